"""Defines the interfaces of an algorithm's parts, without importing torch, to check jobs anywhere.

P prompt groups of G episodes on rank 0; T tokens of S sequences, packed end to end, on the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from relax_hpc.sections import Section

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.floating]
Anchor = Literal["rollout", "old"]
ANCHORS: frozenset[Anchor] = frozenset(get_args(Anchor))
Scope = Literal["row", "group", "batch"]
_SCOPES: tuple[Scope, ...] = ("row", "group", "batch")
Total = Callable[["Tensor"], "Tensor"]
"""Sums a tensor over all ranks that train the batch; collective."""

_NOTHING: "Mapping[str, Tensor]" = {}


class Needs(NamedTuple):
    """Requirements of a part."""

    columns: Mapping[str, str] = {}
    """Schema column -> the setting that needs it, as `key = value`."""
    scope: Scope = "row"
    """Which rows must be there before one of them can be trained on."""
    prepass: bool = False
    """Whether a forward pass over the whole batch and `prepare` come first."""
    min_siblings: int = 1
    """Least siblings of a prompt group."""
    anchors: frozenset[Anchor] = frozenset()
    """Policies whose logprobs it uses."""
    every_row: bool = False
    """Whether rows without an advantage teach, too, and count in the mean."""

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(
            {**self.columns, **other.columns},
            max(self.scope, other.scope, key=_SCOPES.index),
            self.prepass or other.prepass,
            max(self.min_siblings, other.min_siblings),
            self.anchors | other.anchors,
            self.every_row or other.every_row,
        )


class Tokens(Protocol):
    """A packed micro-batch."""

    @property
    def loss_mask(self) -> "Tensor":
        """[T] bool, True on trained tokens. Elsewhere columns may hold anything, also nan and
        infinities: select before `exp`."""
        ...

    @property
    def sequence_ids(self) -> "Tensor":
        """[T] int64, sequence of each token, 0 <= id < S; padding is a sequence, too."""
        ...

    @property
    def groups(self) -> "Tensor":
        """[S] int64, prompt group of each sequence; -1 for padding."""
        ...

    @property
    def columns(self) -> "Mapping[str, Tensor]":
        """[T] by short name: requested ones, `rollout_logprobs`, `old_logprobs`, `advantages`, and
        in a loss `anchor_logprobs`; nats, without gradient."""
        ...

    def with_columns(self, **columns: "Tensor") -> "Tokens":
        """Returns the same with added or replaced columns."""
        ...


class Rows(NamedTuple):
    """The facts about whole prompt groups before any row is read."""

    rewards: npt.NDArray[np.float32]
    """[P, G], per episode; NaN for none, with `reward.on_error = "mask"`: excluded from all
    statistics."""
    lengths: npt.NDArray[np.int64]
    """[P, G] tokens after the prompt, in all rows of an episode."""


class TokenLoss(NamedTuple):
    """The loss of each token, before masks, weights and sums."""

    loss: "Tensor"
    """[T] with gradient."""
    metrics: "Mapping[str, Tensor]" = _NOTHING
    """[T] each, named `loss/...`; they become means over trained tokens."""


class TokenWeights(NamedTuple):
    weights: "Tensor"
    """[T], no gradient; 0 drops a token, which still counts in the mean."""
    metrics: "Mapping[str, Tensor]" = _NOTHING
    """[T] each, named `loss/...`; they become means over trained tokens."""


class LossOutput(NamedTuple):
    """Sums that add up over micro-batches, portions and ranks.

    The trainer divides by the denominator of the whole batch at its end.
    """

    loss: "Tensor"
    """[] carries the gradient."""
    metrics: "Mapping[str, Tensor]"
    """[] each, no gradient; they become means over trained tokens."""
    denominator: "Tensor | None" = None
    """[] number of terms in the loss, no gradient; None: trained tokens."""


LossFunction = Callable[["Tensor", Tokens], LossOutput]
"""([T] logprobs in nats, with gradient; the micro-batch) -> its sums."""


class AlgorithmPart(Section):
    """One part of an algorithm: its settings and its formula."""

    name: str

    def needs(self) -> Needs:
        return Needs()

    def prepare(self, batches: "Sequence[Tokens]", total: Total) -> "list[Tokens]":
        """Processes the whole batch before training; only with `needs().prepass`.

        Args:
            batches: micro-batches of this rank, with `old_logprobs`.
            total: e.g. for a mean over the batch.

        Returns:
            The same with added or replaced columns.
        """
        return list(batches)


class Advantage(AlgorithmPart):
    """How much better an episode, or a token, was than expected."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether it differs by token; it is then unknown until rows are read."""
        return type(self).of_tokens is not Advantage.of_tokens

    def of_groups(self, rows: Rows) -> Floats:
        """Returns [P, G], on rank 0: groups are compared by episode, whatever the number of
        rows."""
        return np.ones_like(rows.rewards)

    def of_tokens(self, tokens: Tokens) -> "Tensor | None":
        """Returns [T] when rows are read, from the needed columns; None: the row's value."""
        return None


class Loss(AlgorithmPart):
    """The cost of a token that has an advantage."""

    anchor: Anchor = "rollout"
    """Policy in the denominator of the ratio. rollout: the sampler, by its reported logprobs, which
    bounds the distance from the samples' policy. old: the policy before the step."""

    @property
    def has_trust_region(self) -> bool:
        """Whether it keeps the policy near the anchor."""
        return True

    @property
    def ratio_of(self) -> Literal["token", "sequence"]:
        """Whether a ratio belongs to a token or a sequence."""
        return "token"

    def needs(self) -> Needs:
        return Needs(anchors=frozenset({self.anchor}))

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """Returns the loss of each token.

        Args:
            logprobs: [T] nats, current policy, with gradient.
            tokens: with `advantages` and `anchor_logprobs`.
        """
        raise NotImplementedError


class Correction(AlgorithmPart):
    """Weights for tokens that another policy, or another program, sampled."""

    @property
    def has_ratios(self) -> bool:
        """Whether its weights are ratios of policies; else they only drop tokens."""
        return True

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        """Weighs tokens by `old_logprobs` and `rollout_logprobs`."""
        raise NotImplementedError
