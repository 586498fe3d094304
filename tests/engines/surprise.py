"""An algorithm that reads a column of a new role: one file, and a line of the table.

    loss = -sum_t surprise_t r_t A_t,  r_t = exp(logprobs_t - old_logprobs_t)

over trained tokens t; the mean is over them.
"""

from typing import Literal

from relax_hpc.algorithms.algorithm import Algorithm, LossOutput, Needs, Settings


class SurpriseSettings(Settings):
    name: Literal["surprise"] = "surprise"


def _loss(_, __):
    import torch

    def loss(logprobs, tokens):
        columns, mask = tokens.columns, tokens.loss_mask
        ratio = torch.where(mask, logprobs - columns["old_logprobs"], 0.0).exp()
        worth = torch.where(mask, columns["surprise"] * columns["advantages"], 0.0)
        return LossOutput(-(ratio * worth).sum(), {})

    return loss


SURPRISE = Algorithm(
    "surprise",
    SurpriseSettings,
    _loss,
    lambda _, rows: rows.rewards,
    needs=lambda _: Needs({"ragged/surprise": "algorithm.name = 'surprise'"}),
)
