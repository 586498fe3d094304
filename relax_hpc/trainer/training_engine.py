"""Defines the protocols of an engine that computes a model, and of one that trains it.

Every rank has one. Methods are collective over its ranks unless noted; properties are not.
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
"""Reads media of rows, by (row, index of the medium): [frames, height, width, 3], canonical; yields
each once it is decoded."""


class NonFiniteSample(NamedTuple):
    """A trajectory with a value that is not finite."""

    guid: int
    sibling: int
    dp_rank: int
    micro_batch: int
    """Index among the rank's micro-batches of this step, from 0."""
    what: str
    """`logprobs`, `loss`, or `gradient` (of the loss by the logprobs)."""


class SkippedUpdate(NamedTuple):
    """The reason why an update was skipped."""

    reason: str
    samples: tuple[NonFiniteSample, ...]
    """A few of them. None if only the gradient inside the model is not finite."""
    num_samples: int
    """Number of samples with a value that is not finite."""
    in_a_row: int
    """Skipped updates, this one included, without those for a too large loss scale."""
    is_model: bool = False
    """Whether no sample has finite logprobs: the weights are at fault, not the samples."""


class Worst(NamedTuple):
    """The token with the largest difference between the logprobs of two engines."""

    guid: int
    sibling: int
    token: int
    """Index in the trajectory, from 0, prompt included."""
    engine: float
    """The sampler's logprob, nats."""
    trainer: float


class LogprobGap(NamedTuple):
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
        """Waits for all parts and writes the index; returns the bytes of all files. Called on rank
        0."""
        ...


class ScoringEngine(Protocol):
    @property
    def dp_rank(self) -> int:
        """Returns the index of this rank's data-parallel replica, whose ranks get the same rows."""
        ...

    def forward_logprobs(
        self, trajectories: Sequence[Row], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns [tokens] nats per trajectory; `micro_batches` index `trajectories`."""
        ...

    def see_by(self, pixels: Pixels) -> None:
        """Sets the source of rows' canonical pixels; not collective."""
        ...


class TrainingEngine(ScoringEngine, Protocol):
    step: int
    """Batches trained on; also the policy version of the weights."""

    @property
    def skip(self) -> SkippedUpdate | None:
        """Returns why the last update was skipped, if it was."""
        ...

    @property
    def costs(self) -> dict[str, float]:
        """Returns time, memory and utilisation of the last step's training."""
        ...

    def warm_up(self) -> None:
        """Compiles and sets up what the first step needs; the model stays unchanged."""
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
            mini_batches: number of micro-batches of each update; empty: one update.
        """
        ...

    def engine_gap(self) -> LogprobGap | None:
        """Measures the gap between the sampler and this policy in the accumulated rows.

        Only tokens that this very policy sampled count; None if there are none.
        """
        ...

    def update(self) -> dict[str, float]:
        """Turns policy `step` into `step` + 1 by the accumulated rows; returns metrics."""
        ...

    def keep(self, name: str, folder: Path | None = None, *, lasting: bool = False) -> None:
        """Keeps the current weights under a name, or those of a Hugging Face folder.

        Args:
            lasting: whether checkpoints hold them, too.
        """
        ...

    def forward_kept_logprobs(
        self,
        name: str,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
    ) -> list[npt.NDArray[np.float32]]:
        """Does as `forward_logprobs` under kept weights."""
        ...

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors under Hugging Face names; every rank must iterate to the end."""
        ...

    def lend(self) -> None:
        """Frees memory that it needs only during training."""
        ...

    def reclaim(self) -> None: ...

    def expect_saves(self) -> None:
        """Begins to take memory for `checkpoint_part`; returns at once, not collective."""
        ...

    def checkpoint_part(self, *, copy: bool) -> CheckpointPart:
        """Returns this rank's part of a checkpoint; a copy lets training continue meanwhile.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        ...

    def damage(self, folder: Path) -> str | None:
        """Returns why a checkpoint is incomplete, naming a file; not collective."""
        ...

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; raises CheckpointError on every rank if one finds damage."""
        ...
