"""The loss that a run trains with, composed of the parts that an algorithm declares."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from relax_hpc.algorithms.algorithm import (
    Algorithm,
    Correction,
    Loss,
    LossOutput,
    Settings,
    Tokens,
)

if TYPE_CHECKING:
    from torch import Tensor


def loss_of(algorithm: Algorithm, settings: Settings, columns: frozenset[str]) -> Loss:
    """Returns the loss with correction, advantages of tokens and KL term, as far as declared.

    Args:
        algorithm: to train with.
        settings: of the algorithm.
        columns: short names of those that all rows have.
    """
    loss = algorithm.loss(settings, columns)
    if algorithm.correction is not None:
        loss = _corrected(loss, partial(algorithm.correction, settings))
    if algorithm.token_advantages is not None:
        loss = _estimated(loss, partial(algorithm.token_advantages, settings))
    if algorithm.kl is not None and "ref_logprobs" in columns:
        loss = _pulled(loss, algorithm.kl(settings))
    return loss


def _corrected(loss: Loss, correct: "Callable[[Tokens], Correction]") -> Loss:
    def corrected(logprobs: "Tensor", tokens: Tokens) -> LossOutput:
        weights, metrics = correct(tokens)
        output = loss(logprobs, tokens.with_columns(correction=weights))
        return output._replace(metrics=output.metrics | metrics)

    return corrected


def _estimated(loss: Loss, estimate: "Callable[[Tokens], Tensor]") -> Loss:
    return lambda logprobs, tokens: loss(logprobs, tokens.with_columns(advantages=estimate(tokens)))


def _pulled(loss: Loss, coefficient: float) -> Loss:
    from relax_hpc.algorithms.clipped import with_kl

    return lambda logprobs, tokens: with_kl(
        loss(logprobs, tokens),
        logprobs,
        tokens.columns["ref_logprobs"],
        tokens.loss_mask,
        coefficient=coefficient,
    )
