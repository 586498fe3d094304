"""The loss that a run trains with, composed of the parts of its algorithm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.algorithms.aggregation import token_weights
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.corrections.none import NoCorrection
from relax_hpc.algorithms.distill import Distill
from relax_hpc.algorithms.entropy import Entropy, NoEntropy
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import LossFunction, LossOutput, Tokens, Total
from relax_hpc.algorithms.ratios import spread

if TYPE_CHECKING:
    from torch import Tensor

Prepare = Callable[[Sequence[Tokens], Total], list[Tokens]]
TokenWeighing = Callable[[Tokens], "Tensor | None"]
"""The [T] factor of each trained token in the loss; None if tokens count the same."""


def counts_the_same(tokens: Tokens) -> None:
    """The weights of a mean over trained tokens."""


class Objective(NamedTuple):
    """The function that a trainer minimizes."""

    loss: LossFunction
    prepare: Prepare | None = None
    """Looks at the whole batch before any of it is trained on; all ranks that train rows call it,
    also without rows. None: no forward pass comes first."""
    reads_old: bool = True
    """Whether the loss reads `old_logprobs`."""
    entropy: Entropy = NoEntropy()
    """Says the weight of the entropy in the loss."""
    weights: TokenWeighing = counts_the_same
    """Says what tokens weigh, for losses that a model adds to this one."""


def objective_of(algorithm: Algorithm, columns: frozenset[str] = frozenset()) -> Objective:
    """Composes the parts of an algorithm.

    Args:
        algorithm: to train with.
        columns: short names of those that all rows have.
    """
    needs = algorithm.needs
    return Objective(
        partial(_loss, algorithm, _measured_kl(algorithm, columns)),
        partial(_prepared, algorithm) if needs.prepass else None,
        needs.prepass or "old" in needs.anchors,
        algorithm.entropy,
        partial(token_weights, algorithm.aggregation),
    )


def _measured_kl(algorithm: Algorithm, columns: frozenset[str]) -> Kl | None:
    if "ref_logprobs" not in columns:
        return None
    return algorithm.kl if isinstance(algorithm.kl, Kl) else Kl(name="k3", coefficient=0.0)


def _prepared(algorithm: Algorithm, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
    """Asks the parts that want it, in the order in which a reward becomes a loss."""
    found = [_with_advantages(algorithm, tokens) for tokens in batches]
    parts = (algorithm.kl, algorithm.advantage, algorithm.distill, algorithm.loss)
    for part in (*parts, algorithm.correction):
        if part.needs().prepass or isinstance(part, Distill):
            found = part.prepare(found, total)
    return found


def _loss(algorithm: Algorithm, kl: Kl | None, logprobs: "Tensor", tokens: Tokens) -> LossOutput:
    mask = tokens.loss_mask
    logprobs = logprobs.where(mask, 0.0)  # whatever a part makes of garbage has no gradient
    if not algorithm.needs.prepass:
        tokens = _taught(algorithm, _with_advantages(algorithm, tokens))
    anchor = "rollout_logprobs" if algorithm.loss.anchor == "rollout" else "old_logprobs"
    tokens = tokens.with_columns(anchor_logprobs=tokens.columns[anchor])
    found = algorithm.loss.of_tokens(logprobs, tokens)
    sums = _Sums(tokens, token_weights(algorithm.aggregation, tokens))
    sums.measure({**spread(logprobs, tokens), **found.metrics})
    value = found.loss.where(mask, 0.0)
    if not isinstance(algorithm.correction, NoCorrection):
        corrected = algorithm.correction.of_tokens(tokens)
        sums.measure(corrected.metrics)
        value = corrected.weights.where(mask, 0.0) * value
    total = sums.over_tokens(value)
    if kl is not None:
        distance = kl.of_tokens(logprobs, tokens)
        sums.measure(distance.metrics)
        if kl.coefficient and kl.place == "loss":
            total = total + kl.coefficient * sums.over_tokens(distance.loss)
    if isinstance(algorithm.distill, Distill):
        apart = algorithm.distill.of_tokens(logprobs, tokens)
        sums.measure(apart.metrics)
        if algorithm.distill.name == "loss":
            total = total + algorithm.distill.coefficient * sums.over_tokens(apart.loss)
    if "entropy_weight" in tokens.columns:
        weight, entropy = tokens.columns["entropy_weight"], tokens.columns["entropy"]
        total = total - sums.over_tokens(weight * entropy)
    return LossOutput(total, sums.metrics, sums.denominator())


def _with_advantages(algorithm: Algorithm, tokens: Tokens) -> Tokens:
    advantages = algorithm.advantage.of_tokens(tokens)
    return tokens if advantages is None else tokens.with_columns(advantages=advantages)


def _taught(algorithm: Algorithm, tokens: Tokens) -> Tokens:
    teacher = algorithm.distill
    return teacher.with_advantages(tokens) if isinstance(teacher, Distill) else tokens


class _Sums:
    """Sums over the trained tokens of a micro-batch, with the weights that they have."""

    def __init__(self, tokens: Tokens, weights: "Tensor | None") -> None:
        self._tokens, self._weights = tokens, weights
        self.metrics: dict[str, Tensor] = {}

    def measure(self, metrics: "Mapping[str, Tensor]") -> None:
        """Notes sums without weights, all in one go: each call to the GPU takes its time."""
        import torch

        if metrics:
            mask, size = self._tokens.loss_mask, self._tokens.loss_mask.shape
            values = torch.stack([value.float().expand(size) for value in metrics.values()])
            sums = values.where(mask, 0).sum(dim=1)
            self.metrics |= dict(zip(metrics, sums.unbind(), strict=True))

    def over_tokens(self, values: "Tensor") -> "Tensor":
        """[] of [T]."""
        kept = values.where(self._tokens.loss_mask, 0.0)
        return (kept if self._weights is None else self._weights * kept).sum()

    def denominator(self) -> "Tensor | None":
        """Sum of what the rows count that have a trained token; None without weights."""
        from relax_hpc.algorithms.segments import mean_over

        tokens = self._tokens
        if "counts" not in tokens.columns:
            return None
        ids, mask = tokens.sequence_ids, tokens.loss_mask
        return mean_over(tokens.columns["counts"], ids, mask, len(tokens.groups)).sum()
