"""Computes probability ratios of tokens between two policies."""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from relax_hpc.algorithms.part import Tokens

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20.0
"""Largest abs(log ratio) with a gradient."""
_LEAST = 1e-6


def log_ratio(logprobs: "Tensor", tokens: Tokens, base: str = "anchor_logprobs") -> "Tensor":
    """Returns [T] logprobs minus those of `base`; 0 off the mask, no gradient beyond `LARGEST`."""
    gap = logprobs - tokens.columns[base]
    return gap.where(tokens.loss_mask, 0.0).clamp(-LARGEST, LARGEST)


def weight_logs(tokens: Tokens) -> "Tensor":
    """Returns [T] log w of corrections, w = pi_old / mu, without gradient."""
    return log_ratio(tokens.columns["old_logprobs"], tokens, "rollout_logprobs").detach()


def advantages_of(tokens: Tokens) -> "Tensor":
    return tokens.columns["advantages"].where(tokens.loss_mask, 0.0)


def sequence_means(values: "Tensor", tokens: Tokens) -> "Tensor":
    """Returns [T] the mean of `values` over the trained tokens of each token's sequence."""
    from relax_hpc.algorithms.segments import mean_over, spread_to

    ids = tokens.sequence_ids
    return spread_to(ids, mean_over(values, ids, tokens.loss_mask, len(tokens.groups)))


def sequence_sums(values: "Tensor", tokens: Tokens) -> "Tensor":
    """Returns [T] the sum of `values` over the trained tokens of each token's sequence."""
    from relax_hpc.algorithms.segments import spread_to, sum_over

    ids = tokens.sequence_ids
    return spread_to(ids, sum_over(values, ids, tokens.loss_mask, len(tokens.groups)))


def sequence_ratio(logs: "Tensor", tokens: Tokens) -> "Tensor":
    """Returns [T] exp of the mean of `logs` over each token's sequence, with the gradient of the
    token's own log.

    So each token keeps its own advantage and mask (GSPO-token, arXiv:2507.18071). If all tokens of
    a sequence have the same advantage, and the loss is their mean, the gradient is that of the
    mean.
    """
    return (sequence_means(logs.detach(), tokens) + (logs - logs.detach())).exp()


def shift(logprobs: "Tensor", tokens: Tokens) -> "Tensor":
    """Returns [T] pi - anchor, the difference of the token's probabilities, without gradient."""
    now, then = _probabilities(logprobs, tokens)
    return now - then


def spread(logprobs: "Tensor", tokens: Tokens) -> "dict[str, Tensor]":
    """Returns [T] each: metrics of the ratio r = pi / anchor, without gradient.

    `settle` combines the means of the last two.
    """
    logs = log_ratio(logprobs.detach(), tokens)
    ratio = logs.exp()
    return {
        "loss/approx_kl": ratio - 1 - logs,
        "loss/log_ratio_squared": logs.square(),
        "loss/ratio": ratio,
        "loss/ratio_squared": ratio.square(),
    }


def settle(metrics: MutableMapping[str, float]) -> None:
    """Replaces the mean square by `loss/effective_sample`, the effective sample size.

    (mean of r)^2 / mean of r^2, as a share of the tokens; 1 if all ratios are equal. Does nothing
    without ratios.
    """
    if square := metrics.pop("loss/ratio_squared", 0.0):
        metrics["loss/effective_sample"] = metrics["loss/ratio"] ** 2 / square


def binary_kl(logprobs: "Tensor", tokens: Tokens) -> "tuple[Tensor, Tensor]":
    """Returns [T] KL(anchor || pi) and KL(pi || anchor) of "this token or another", without
    gradient.

    Probabilities are clipped to [1e-6, 1 - 1e-6].
    """
    now, then = (p.clamp(_LEAST, 1 - _LEAST) for p in _probabilities(logprobs, tokens))
    same, other = (now / then).log(), ((1 - now) / (1 - then)).log()
    return -then * same - (1 - then) * other, now * same + (1 - now) * other


def _probabilities(logprobs: "Tensor", tokens: Tokens) -> "tuple[Tensor, Tensor]":
    # Exact where both are: select before exp, since anything may stand off the mask.
    mask, anchor = tokens.loss_mask, tokens.columns["anchor_logprobs"]
    return logprobs.detach().where(mask, 0.0).exp(), anchor.where(mask, 0.0).exp()
