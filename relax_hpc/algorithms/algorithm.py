"""The declaration of an algorithm. Without torch: a job is checked where there is none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.sections import Positive, Section

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.floating]


class Settings(Section):
    """Settings that every algorithm has; a subclass adds its own."""

    name: str
    epochs_per_step: Positive = 1
    """Passes over a batch, each an optimizer update; the ratio is to the policy before them."""


class Needs(NamedTuple):
    """Things that must be there for an algorithm to learn."""

    columns: Mapping[str, str] = {}
    """Column of the schema -> the setting that wants it, as `key = value`. Rows come with them."""
    whole_batches: bool = False
    """Nothing can be trained on before the whole batch is there."""
    min_siblings: int = 1
    """Siblings of a prompt group."""


class Tokens(Protocol):
    """A packed micro-batch as a loss sees it; T tokens of S sequences, end to end."""

    @property
    def loss_mask(self) -> "Tensor":
        """[T] bool, True on trained tokens."""
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
        `advantages`, with an aggregation `weights`, and with a correction `correction`."""
        ...

    def with_columns(self, **columns: "Tensor") -> "Tokens":
        """The same with further columns, or others in place of those it has."""
        ...


class LossOutput(NamedTuple):
    """Sums: they add up over micro-batches, portions and ranks.

    The trainer divides by the denominator of the whole batch, once it has seen all of it.
    """

    loss: "Tensor"
    """[] carries the gradient."""
    metrics: "dict[str, Tensor]"
    """[] each, no gradient; they become means over trained tokens."""
    denominator: "Tensor | None" = None
    """[] how many things the loss is a sum over, no gradient; None: trained tokens."""


class Correction(NamedTuple):
    """Weights of tokens in a loss."""

    weights: "Tensor"
    """[T], no gradient."""
    metrics: "dict[str, Tensor]"
    """[] each, sums over trained tokens."""


Loss = Callable[["Tensor", Tokens], LossOutput]
"""([T] logprobs in nats, with gradient; the micro-batch) -> its sums."""


class Rows(NamedTuple):
    """The facts known of whole prompt groups before any row is read.

    P groups of G episodes; R rows, one or several of each episode.
    """

    rewards: npt.NDArray[np.float32]
    """[P, G], of episodes; NaN where there is none, with `reward.on_error = "mask"`."""
    response_lengths: npt.NDArray[np.int64]
    """[R] tokens after the prompt, of rows; 0 where the episode has no reward."""
    groups: npt.NDArray[np.int64]
    """[R] which prompt group a row is of, 0 <= group < P, rising."""


@dataclass(frozen=True)
class Algorithm:
    """One way to learn: a record in `algorithms.table`."""

    name: str
    settings: type[Settings]
    """Its keys in [algorithm]."""
    loss: Callable[[Any, frozenset[str]], Loss]
    """(settings, short names of the columns that all rows have) -> the loss."""
    advantages: Callable[[Any, Rows], Floats] = lambda _, rows: np.ones_like(rows.rewards)
    """(settings, rows) -> [P, G], on rank 0: each row has the advantage of its episode, and groups
    are compared by episodes, however many rows these have."""
    teaches: Callable[[Any, Floats], npt.NDArray[np.bool_]] = lambda _, advantages: np.ones(
        advantages.shape, bool
    )
    """(settings, [P, G] advantages) -> [P, G], which episodes are trained on; rows of the others
    are not even read, and count in no mean."""
    weights: Callable[[Any, Rows], Floats] | None = None
    """(settings, rows) -> [R] factor of each token's part in the loss, which comes to it as the
    column `weights`: sequence mean, mean per prompt, constant, see `aggregation`. None: 1, which
    makes the mean over trained tokens."""
    needs: Callable[[Any], Needs] = lambda _: Needs()
    token_advantages: "Callable[[Any, Tokens], Tensor] | None" = None
    """(settings, micro-batch) -> [T], where rows are read, of the columns that it asks for, e.g.
    values; the loss then finds these in the column `advantages`. None: all tokens of a row have
    that of the row."""

    correction: "Callable[[Any, Tokens], Correction] | None" = None
    """(settings, micro-batch) -> what tokens weigh that another policy sampled, or another program;
    the loss finds it in the column `correction`. None: there is no such column."""
    kl: Callable[[Any], float] | None = None
    """settings -> coefficient of the KL divergence from the reference, added to the loss where rows
    have `ref_logprobs`; 0 only measures it. None: it is not even measured."""
