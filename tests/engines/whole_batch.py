"""A loss of one's own that looks at the whole batch before any of it is trained on.

    loss_t = -r_t A_t where abs(log r_t) <= b, else 0,  r_t = pi / mu

with b twice the mean of abs(log r) over the batch, at the policy before the step.
"""

from relax_hpc.algorithms.part import Loss, Needs, TokenLoss


class WholeBatch(Loss):
    def needs(self):
        return Needs(prepass=True, anchors=frozenset({self.anchor}))

    def prepare(self, batches, total):
        import torch

        sums = torch.zeros(2, dtype=torch.float64)
        for tokens in batches:
            gap = tokens.columns["old_logprobs"] - tokens.columns["rollout_logprobs"]
            sums += torch.stack([gap[tokens.loss_mask].abs().sum(), tokens.loss_mask.sum()])
        gaps, count = total(sums)
        bound = 2 * gaps / count
        return [
            tokens.with_columns(bound=torch.full(tokens.loss_mask.shape, float(bound)))
            for tokens in batches
        ]

    def of_tokens(self, logprobs, tokens):
        import torch

        columns, mask = tokens.columns, tokens.loss_mask
        log_ratio = torch.where(mask, logprobs - columns["anchor_logprobs"], 0.0)
        kept = log_ratio.detach().abs() <= columns["bound"]
        loss = -(log_ratio.exp() * columns["advantages"]).where(kept, 0.0)
        return TokenLoss(loss, {"loss/kept": kept.float()})


def algorithm():
    """The keys of a job that has it."""
    return {"loss": {"name": f"{__file__}:WholeBatch"}, "correction": {"name": "none"}}
