"""Checkpoints: model, optimizer, schedule and the position in the data, as one atomic unit."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from relax_hpc.comm.world import World
from relax_hpc.errors import BusError, FencedError
from relax_hpc.records import read_json, write_json

log = logging.getLogger(__name__)

_PROGRESS = "progress.json"
_PREFIX = "step_"


class Saveable(Protocol):
    step: int

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class Position(Protocol):
    """How far a run has come in its data: a named tuple of what JSON knows."""

    @property
    def epoch(self) -> int:
        """Never falls along a run."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


P = TypeVar("P", bound=Position)


class Checkpoint(NamedTuple, Generic[P]):
    """A folder that is complete: it got its name when everything was in it."""

    folder: Path
    step: int
    position: P


class Checkpoints(Generic[P]):
    """The checkpoints of a run; `save` and `resume` are collective over the actor's ranks.

    Args:
        root: their folder.
        world: the actor's ranks.
        position_type: makes a position of the values that one consists of.
        keep: how many are kept.
        is_valid: whether a position is one of this run's plan; a trainer that was superseded may
            have left a checkpoint that is not. Rank 0 asks.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        position_type: Callable[..., P],
        *,
        keep: int,
        is_valid: Callable[[P], bool] = lambda _: True,
    ) -> None:
        self._root, self._world, self._keep, self._is_valid = root, world, keep, is_valid
        self._position_type = position_type

    def save(
        self,
        trainer: Saveable,
        position: P | None,
        check_fenced: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves. Older ones than the `keep` newest are deleted.

        Args:
            trainer: every rank's.
            position: rank 0's.
            check_fenced: raises if another trainer took over; rank 0 asks before it publishes.
        """
        folder = self._root / f"{_PREFIX}{trainer.step:08d}"
        draft = folder.with_name(f".{folder.name}.tmp")
        if self._world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self._world.barrier()
        trainer.save(draft)
        self._world.barrier()
        if position is not None:
            write_json(draft / _PROGRESS, {"step": trainer.step, "position": list(position)})
            check_fenced()
            self._refuse_to_replace_newer(folder, position)
            # A resumed run that comes to this step again has the same state to save.
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
            for old in self.complete()[: -self._keep]:
                shutil.rmtree(old.folder)
        self._world.barrier()

    def complete(self) -> list[Checkpoint[P]]:
        """All that count, oldest first; half-written ones have another name and are not seen."""
        found = []
        for folder in sorted(self._root.glob(f"{_PREFIX}*")):
            if progress := read_json(folder / _PROGRESS):
                position = self._position_type(*progress["position"])
                if self._is_valid(position):
                    found.append(Checkpoint(folder, progress["step"], position))
                else:
                    log.warning("%s: comes from a superseded trainer and does not count", folder)
        return found

    def resume(self, trainer: Saveable) -> Checkpoint[P] | None:
        """Loads the newest checkpoint that counts into `trainer`; None if there is none at all.

        Raises:
            BusError: there are some, but none is of this run's plan.
        """
        found = self.complete() if self._world.rank == 0 else []
        if self._world.rank == 0 and not found and any(self._root.glob(f"{_PREFIX}*")):
            raise BusError(
                f"{self._root}: none of the checkpoints is of this run's plan; remove them to "
                "begin again from step 1, if all shards are there still"
            )
        newest: Checkpoint[P] | None = self._world.bcast(found[-1] if found else None)
        if newest:
            trainer.load(newest.folder)
        return newest

    def _refuse_to_replace_newer(self, folder: Path, position: P) -> None:
        if progress := read_json(folder / _PROGRESS):
            epoch = self._position_type(*progress["position"]).epoch
            if epoch > position.epoch:
                raise FencedError(
                    f"{folder}: was saved under plan epoch {epoch}, this trainer's is "
                    f"{position.epoch}; another trainer took over, this one must end"
                )
