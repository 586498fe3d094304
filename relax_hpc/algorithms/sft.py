"""Supervised fine-tuning: the mean of the cross entropy over the trained tokens of documents."""

from typing import TYPE_CHECKING, Literal

from relax_hpc.algorithms.algorithm import Algorithm, Loss, LossOutput, Settings, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class SftSettings(Settings):
    name: Literal["sft"] = "sft"


def _loss(_: SftSettings, __: frozenset[str]) -> Loss:
    from relax_hpc.algorithms.clipped import cross_entropy

    def loss(logprobs: "Tensor", tokens: Tokens) -> LossOutput:
        return cross_entropy(logprobs, tokens.loss_mask)

    return loss


SFT = Algorithm("sft", SftSettings, _loss)
