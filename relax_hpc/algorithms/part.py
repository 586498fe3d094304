"""The parts that an algorithm is made of. Without torch: a job is checked where there is none.

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
"""Sums a tensor over all ranks that train rows of the batch; all of them call it."""

_NOTHING: "Mapping[str, Tensor]" = {}


class Needs(NamedTuple):
    """Things that must be there for a part to do its work."""

    columns: Mapping[str, str] = {}
    """Column of the schema -> the setting that wants it, as `key = value`. Rows come with them."""
    scope: Scope = "row"
    """Rows that must be there before one of them can be trained on."""
    prepass: bool = False
    """A forward pass over the whole batch comes first, and then `prepare`."""
    min_siblings: int = 1
    """Siblings of a prompt group."""
    anchors: frozenset[Anchor] = frozenset()
    """Policies whose logprobs it compares with."""
    every_row: bool = False
    """Rows without an advantage teach, too: they are read, and count in the mean."""

    def __or__(self, other: "Needs") -> "Needs":
        """The needs of both."""
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
        """[T] bool, True on trained tokens. Where it is False columns may hold anything, also nan
        and infinities: select before `exp`."""
        ...

    @property
    def sequence_ids(self) -> "Tensor":
        """[T] int64, which sequence a token is in, 0 <= id < S; padding is a sequence, too."""
        ...

    @property
    def groups(self) -> "Tensor":
        """[S] int64, prompt group of each sequence; -1 for padding."""
        ...

    @property
    def columns(self) -> "Mapping[str, Tensor]":
        """[T] by short name: those that were asked for, `rollout_logprobs`, `old_logprobs`,
        `advantages`, and in a loss `anchor_logprobs`; nats, without gradient."""
        ...

    def with_columns(self, **columns: "Tensor") -> "Tokens":
        """The same with further columns, or others in place of those it has."""
        ...


class Rows(NamedTuple):
    """The facts known of whole prompt groups before any row is read."""

    rewards: npt.NDArray[np.float32]
    """[P, G], of episodes; NaN where there is none, with `reward.on_error = "mask"`: such a sibling
    is in no statistic."""
    lengths: npt.NDArray[np.int64]
    """[P, G] tokens after the prompt, of all rows of an episode."""


class TokenLoss(NamedTuple):
    """The loss of each token, before masks, weights and sums."""

    loss: "Tensor"
    """[T] with gradient."""
    metrics: "Mapping[str, Tensor]" = _NOTHING
    """[T] each, named `loss/...`; they become means over trained tokens."""


class TokenWeights(NamedTuple):
    """Factors of the tokens' losses."""

    weights: "Tensor"
    """[T], no gradient; 0 leaves a token out, which still counts in the mean."""
    metrics: "Mapping[str, Tensor]" = _NOTHING
    """[T] each, named `loss/...`; they become means over trained tokens."""


class LossOutput(NamedTuple):
    """Sums: they add up over micro-batches, portions and ranks.

    The trainer divides by the denominator of the whole batch, once it has seen all of it.
    """

    loss: "Tensor"
    """[] carries the gradient."""
    metrics: "Mapping[str, Tensor]"
    """[] each, no gradient; they become means over trained tokens."""
    denominator: "Tensor | None" = None
    """[] how many things the loss is a sum over, no gradient; None: trained tokens."""


LossFunction = Callable[["Tensor", Tokens], LossOutput]
"""([T] logprobs in nats, with gradient; the micro-batch) -> its sums."""


class Part(Section):
    """One part of an algorithm: its settings, and the formula that they are of."""

    name: str
    """The part."""

    def needs(self) -> Needs:
        """Returns what must be there for it."""
        return Needs()

    def prepare(self, batches: "Sequence[Tokens]", total: Total) -> "list[Tokens]":
        """Looks at the whole batch before any of it is trained on; only with `needs().prepass`.

        Args:
            batches: micro-batches of this rank, with `old_logprobs`.
            total: e.g. for a mean over the batch.

        Returns:
            The same with further columns, or others in place of those that they have.
        """
        return list(batches)


class Advantage(Part):
    """How much better an episode, or a token, was than expected."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether tokens of a row differ; nothing is known of them before rows are read."""
        return type(self).of_tokens is not Advantage.of_tokens

    def of_groups(self, rows: Rows) -> Floats:
        """[P, G], on rank 0: groups are compared by episodes, however many rows these have."""
        return np.ones_like(rows.rewards)

    def of_tokens(self, tokens: Tokens) -> "Tensor | None":
        """[T], where rows are read, of the columns that it needs; None: that of the row."""
        return None


class Loss(Part):
    """The cost of a token that has an advantage."""

    anchor: Anchor = "rollout"
    """Policy in the denominator of the ratio. rollout: the sampler, by the logprobs that it
    reported, which bounds how far the policy goes from what was sampled. old: the policy before the
    step."""

    @property
    def has_trust_region(self) -> bool:
        """Whether it holds the policy near the anchor."""
        return True

    @property
    def ratio_of(self) -> Literal["token", "sequence"]:
        """Tokens of one ratio."""
        return "token"

    def needs(self) -> Needs:
        return Needs(anchors=frozenset({self.anchor}))

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """The loss of each token.

        Args:
            logprobs: [T] nats, current policy, with gradient.
            tokens: with `advantages` and `anchor_logprobs`.
        """
        raise NotImplementedError


class Correction(Part):
    """The weights of tokens that another policy, or another program, sampled."""

    @property
    def has_ratios(self) -> bool:
        """Whether its weights are ratios of policies; else they only leave tokens out."""
        return True

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        """Weights by `old_logprobs` and `rollout_logprobs`."""
        raise NotImplementedError
