"""Checkpoints: model, optimizer, schedule and the position in the plan, as one atomic unit."""

import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

from relax_hpc.bus.plan import PlanPosition
from relax_hpc.comm.world import World
from relax_hpc.records import read_json, write_json

_PROGRESS = "progress.json"
_PREFIX = "step_"


class Saveable(Protocol):
    step: int

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class Checkpoint(NamedTuple):
    """A folder that is complete: it got its name when everything was in it."""

    folder: Path
    step: int
    position: PlanPosition


class Checkpoints:
    """The checkpoints of a run; `save` and `resume` are collective over the actor's ranks."""

    def __init__(self, root: Path, world: World, *, keep: int) -> None:
        self._root, self._world, self._keep = root, world, keep

    def save(self, trainer: Saveable, position: PlanPosition | None) -> None:
        """Saves; `position` is rank 0's. Older ones than the `keep` newest are deleted."""
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
            # A resumed run that comes to this step again has the same state to save.
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
            for old in self.complete()[: -self._keep]:
                shutil.rmtree(old.folder)
        self._world.barrier()

    def complete(self) -> list[Checkpoint]:
        """All there are, oldest first; half-written ones have another name and are not seen."""
        found = []
        for folder in sorted(self._root.glob(f"{_PREFIX}*")):
            if progress := read_json(folder / _PROGRESS):
                position = PlanPosition(*progress["position"])
                found.append(Checkpoint(folder, progress["step"], position))
        return found

    def resume(self, trainer: Saveable) -> Checkpoint | None:
        """Loads the newest checkpoint into `trainer`; None if there is none."""
        found = self.complete() if self._world.rank == 0 else []
        newest: Checkpoint | None = self._world.bcast(found[-1] if found else None)
        if newest:
            trainer.load(newest.folder)
        return newest
