"""Parts of one's own, as somebody would add them: a file, and names in the job.

advantage of tokens: A_t = sum_(i >= t) gamma^(i - t) reward_i, trained tokens of a sequence
loss: -sum_t A_t r_t,  r_t = exp(logprobs_t - old_logprobs_t); the mean is over trained tokens
"""

from relax_hpc.algorithms.part import Advantage, Loss, TokenLoss

GAMMA = 0.5


class Discounted(Advantage):
    gamma: float = GAMMA
    """Worth of the next token's reward."""

    def of_tokens(self, tokens):
        import torch

        ids, place = tokens.sequence_ids, torch.arange(len(tokens.sequence_ids))
        later = (ids[:, None] == ids) & (place >= place[:, None])
        reward = torch.where(tokens.loss_mask, tokens.columns["rollout_logprobs"], 0.0)
        worth = self.gamma ** (place - place[:, None]).clamp(min=0) * reward
        return torch.where(later, worth, 0.0).sum(1)


class Ratio(Loss):
    @property
    def has_trust_region(self):
        return False

    def of_tokens(self, logprobs, tokens):
        columns, mask = tokens.columns, tokens.loss_mask
        ratio = (logprobs - columns["anchor_logprobs"]).where(mask, 0.0).exp()
        return TokenLoss(-ratio * columns["advantages"].where(mask, 0.0))


DISCOUNTED = {
    "advantage": {"name": f"{__file__}:Discounted"},
    "loss": {"name": f"{__file__}:Ratio", "anchor": "old"},
    "correction": {"name": "none"},
}
"""The keys of a job that has both."""
