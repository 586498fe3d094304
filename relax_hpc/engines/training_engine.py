"""The protocols of an engine that computes a model, and of one that trains it.

Every rank has one. Methods are collective over its ranks, properties are not, unless it says so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from relax_hpc.algorithms.composition import Objective
from relax_hpc.schema import Row

Pixels = Callable[[Sequence[tuple[Row, int]]], Iterable[npt.NDArray[np.uint8]]]
"""Reads media of rows, by (row, place of the medium): [frames, height, width, 3], canonical; each
once it is decoded."""


class Sample(NamedTuple):
    """A trajectory with something that is not finite."""

    guid: int
    sibling: int
    dp_rank: int
    micro_batch: int
    """Index among the rank's micro-batches of this step, from 0."""
    what: str
    """`logprobs`, `loss`, or `gradient` (of the loss by the logprobs)."""


class Skip(NamedTuple):
    """The reason why an update was not done."""

    reason: str
    samples: tuple[Sample, ...]
    """A few of them. None if only the gradient inside the model is not finite."""
    num_samples: int
    """Samples with something that is not finite, named or not."""
    in_a_row: int
    """Updates, this one included; not those for which a loss scale was too large."""
    is_model: bool = False
    """No sample has finite logprobs: it is the weights, not the samples."""


class Worst(NamedTuple):
    """The token of which the logprobs of two engines differ most."""

    guid: int
    sibling: int
    token: int
    """Index in the trajectory, from 0, prompt included."""
    engine: float
    """The sampler's logprob, nats."""
    trainer: float


class Gap(NamedTuple):
    """The gap between logprobs of tokens that the trainer's own policy sampled, nats."""

    num_tokens: int
    mean: float
    max: float
    k3: float
    worst: Worst


class CheckpointPart(Protocol):
    """One rank's part of a checkpoint; no method is collective."""

    def write(self, folder: Path) -> None:
        """Writes the rank's part, durably; raises CheckpointError."""
        ...

    def write_names(self, folder: Path, *, timeout_s: float, cancelled: Callable[[], bool]) -> int:
        """Waits for all parts and names them; returns the bytes of all files. Rank 0 does."""
        ...


class ScoringEngine(Protocol):
    """A model that gives logprobs."""

    @property
    def dp_rank(self) -> int:
        """Index of this rank's data-parallel replica, whose ranks are given the same rows."""
        ...

    def forward_logprobs(
        self, trajectories: Sequence[Row], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns [tokens] nats per trajectory; `micro_batches` index `trajectories`."""
        ...

    def see_by(self, pixels: Pixels) -> None:
        """Says where the canonical pixels of rows come from; not collective."""
        ...


class TrainingEngine(ScoringEngine, Protocol):
    """A model that learns."""

    step: int
    """Batches trained on; also the policy version of the weights."""

    @property
    def skip(self) -> Skip | None:
        """Reason why the last update was not done, if it was not."""
        ...

    @property
    def costs(self) -> dict[str, float]:
        """Time, memory and use of the hardware of the last step's training."""
        ...

    def warm_up(self) -> None:
        """Compiles and sets up what the first step would; the model stays what it is."""
        ...

    def accumulate(
        self,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
        objective: Objective,
        *,
        last: bool = False,
        mini_batches: Sequence[int] = (),
    ) -> None:
        """Adds the gradient of a part of the batch; `micro_batches` index `trajectories`.

        Args:
            last: nothing follows.
            mini_batches: number of micro-batches of each update; empty: there is one.
        """
        ...

    def engine_gap(self) -> Gap | None:
        """Measures how far the sampler is from this policy, by what was accumulated.

        Only tokens that this very policy sampled count; None if there are none.
        """
        ...

    def update(self) -> dict[str, float]:
        """Turns policy `step` into `step` + 1 by what was accumulated; returns metrics."""
        ...

    def keep(self, name: str, folder: Path | None = None, *, lasting: bool = False) -> None:
        """Keeps the weights of now under a name, or those of a Hugging Face folder.

        Args:
            lasting: checkpoints hold them, too.
        """
        ...

    def kept_logprobs(
        self,
        name: str,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
    ) -> list[npt.NDArray[np.float32]]:
        """Does as `forward_logprobs` under weights that were kept."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names; every rank must iterate to the end."""
        ...

    def lend(self) -> None:
        """Gives up memory that it needs only while it trains."""
        ...

    def reclaim(self) -> None: ...

    def expect_saves(self) -> None:
        """Begins to take what `checkpoint_part` will need; returns at once, not collective."""
        ...

    def checkpoint_part(self, *, copy: bool) -> CheckpointPart:
        """Returns this rank's part of a checkpoint; a copy lets training go on meanwhile.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        ...

    def damage(self, folder: Path) -> str | None:
        """Returns why a checkpoint is not whole, naming a file; not collective."""
        ...

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; raises CheckpointError on every rank if one finds damage."""
        ...
