"""A loss that reads a column of a new role: one file, and its name in the job.

    loss_t = -surprise_t r_t A_t,  r_t = exp(logprobs_t - old_logprobs_t)

The mean is over trained tokens.
"""

from relax_hpc.algorithms.part import Advantage, Loss, Needs, TokenLoss


class Reward(Advantage):
    def of_groups(self, rows):
        return rows.rewards


class Surprise(Loss):
    @property
    def has_trust_region(self):
        return False

    def needs(self):
        return super().needs() | Needs(
            {"ragged/surprise": f"algorithm.loss.name = {self.name!r}"}, every_row=True
        )

    def of_tokens(self, logprobs, tokens):
        columns, mask = tokens.columns, tokens.loss_mask
        ratio = (logprobs - columns["anchor_logprobs"]).where(mask, 0.0).exp()
        return TokenLoss(-ratio * (columns["surprise"] * columns["advantages"]).where(mask, 0.0))


def algorithm():
    """The keys of a job that has both."""
    return {
        "advantage": {"name": f"{__file__}:Reward"},
        "loss": {"name": f"{__file__}:Surprise", "anchor": "old"},
        "correction": {"name": "none"},
    }
