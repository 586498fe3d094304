"""Composes the loss of a run from the parts of its algorithm.

Also has the losses of supervised fine-tuning (mean cross entropy) and of a critic.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.algorithms.aggregation import token_weights
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.corrections.none import NoCorrection
from relax_hpc.algorithms.distill import Distill
from relax_hpc.algorithms.entropy import Entropy, NoEntropy
from relax_hpc.algorithms.estimates import estimate_gae
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import LossFunction, LossOutput, Tokens, Total
from relax_hpc.algorithms.ratios import spread

if TYPE_CHECKING:
    from torch import Tensor

Prepare = Callable[[Sequence[Tokens], Total], list[Tokens]]
TokenWeighing = Callable[[Tokens], "Tensor | None"]
"""Returns the [T] factor of each trained token's loss; None if tokens count the same."""


def counts_the_same(tokens: Tokens) -> None:
    """The weights of a mean over trained tokens."""


class Objective(NamedTuple):
    loss: LossFunction
    prepare: Prepare | None = None
    """Processes the whole batch before training; collective over the ranks that train, also those
    without rows. None: no forward pass comes first."""
    reads_old: bool = True
    entropy: Entropy = NoEntropy()
    """Gives the weight of the entropy in the loss."""
    weights: TokenWeighing = counts_the_same
    """Weighs tokens for a model's additional losses."""


def objective_of(algorithm: Algorithm, columns: frozenset[str] = frozenset()) -> Objective:
    """Composes the parts of an algorithm.

    Args:
        columns: short names of columns in all rows.
    """
    needs = algorithm.needs
    return Objective(
        partial(_loss, algorithm, _choose_kl(algorithm, columns)),
        partial(_prepare, algorithm) if needs.prepass else None,
        needs.prepass or "old" in needs.anchors,
        algorithm.entropy,
        partial(token_weights, algorithm.aggregation),
    )


def _choose_kl(algorithm: Algorithm, columns: frozenset[str]) -> Kl | None:
    if "ref_logprobs" not in columns:
        return None
    return algorithm.kl if isinstance(algorithm.kl, Kl) else Kl(name="k3", coefficient=0.0)


def _prepare(algorithm: Algorithm, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
    """Calls the parts that need it, in the order in which a reward becomes a loss."""
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
    """Weighted sums over the trained tokens of a micro-batch."""

    def __init__(self, tokens: Tokens, weights: "Tensor | None") -> None:
        self._tokens, self._weights = tokens, weights
        self.metrics: dict[str, Tensor] = {}

    def measure(self, metrics: "Mapping[str, Tensor]") -> None:
        """Adds unweighted sums, all in a single GPU call."""
        import torch

        if metrics:
            mask, size = self._tokens.loss_mask, self._tokens.loss_mask.shape
            values = torch.stack([value.float().expand(size) for value in metrics.values()])
            sums = values.where(mask, 0).sum(dim=1)
            self.metrics |= dict(zip(metrics, sums.unbind(), strict=True))

    def over_tokens(self, values: "Tensor") -> "Tensor":
        """Reduces [T] to []."""
        kept = values.where(self._tokens.loss_mask, 0.0)
        return (kept if self._weights is None else self._weights * kept).sum()

    def denominator(self) -> "Tensor | None":
        """Sum of the counts of rows with a trained token; None without weights."""
        from relax_hpc.algorithms.segments import mean_over

        tokens = self._tokens
        if "counts" not in tokens.columns:
            return None
        ids, mask = tokens.sequence_ids, tokens.loss_mask
        return mean_over(tokens.columns["counts"], ids, mask, len(tokens.groups)).sum()


def cross_entropy(logprobs: "Tensor", tokens: Tokens) -> LossOutput:
    """Negative log-likelihood of the trained tokens.

    Args:
        logprobs: [T] nats, with gradient.
    """
    return LossOutput(-logprobs.where(tokens.loss_mask, 0.0).sum(), {})


def value_loss(*, clip: float, gamma: float, lam: float) -> LossFunction:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), R = V_old + A of `lam`.

    V_old are the values that the batch came with, R is without gradient. The clip is that of PPO's
    own code (arXiv:1707.06347 has none; verl and OpenRLHF have it with the half, slime without).
    R with lam = 1 and gamma = 1 is the reward, whatever V_old is: the unbiased target of VAPO
    (arXiv:2504.05118), decoupled from the lam of the policy's advantages.

    Args:
        clip: c; 0 does not clip.
        gamma: and `lam`, see `estimates.estimate_gae`.
    """

    def loss(values: "Tensor", tokens: Tokens) -> LossOutput:
        mask = tokens.loss_mask
        known = tokens.columns["values"]
        to_come = tokens.columns["advantages"]
        advantages = estimate_gae(known, to_come, tokens, gamma=gamma, lam=lam)
        old = known.where(mask, 0)
        returns = old + advantages.float()
        new = values.where(mask, 0)
        squares = (new - returns).square()
        clipped = new.detach().new_zeros(())
        if clip > 0:
            held = (old + (new - old).clamp(-clip, clip) - returns).square()
            clipped = ((held > squares) & mask).sum()
            squares = squares.maximum(held)
        error = new.detach() - returns
        return LossOutput(
            squares.sum() / 2,
            {
                "value/mean": new.detach().sum(),
                "value/clipped": clipped,
                "value/error": error.sum(),
                "value/square_error": error.square().sum(),
                "value/return": returns.sum(),
                "value/square_return": returns.square().sum(),
            },
        )

    return loss
