"""Checkpoints: model, optimizer, schedule and the position in the data, as one atomic unit.

A checkpoint is written beside training, by a thread of every rank. Threads share files, not a
process group: ranks put their parts into a folder of a temporary name, and rank 0, which sees them
there, renames it when all of them are on disk. Training looks at the end of each step whether that
has happened, or what went wrong.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from relax_hpc.checkpoints.pending import PendingSave, Saved
from relax_hpc.comm.world import SoloWorld, World
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.errors import BusError, CheckpointError, FencedError
from relax_hpc.records import read_json, sync, write_json
from relax_hpc.storage import DAMAGE_S, delete_folder, exists, move, names, patiently

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Saves in a row that may fail before the actor ends."""
_PROGRESS = "progress.json"
_NAME = re.compile(r"step_(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.step_\d+\.[0-9a-f]+\.(draft|old)")
_KEPT = "kept"
_TORN = "torn"


class Position(Protocol):
    """The position of a run in the data: a named tuple of what JSON knows."""

    @property
    def fence(self) -> int:
        """Fence of the plan; never falls along a run."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


P = TypeVar("P", bound=Position)


class Checkpoint(NamedTuple, Generic[P]):
    """A folder that is complete: it got its name when everything was in it."""

    folder: Path
    step: int
    position: P


class _Unreadable(NamedTuple):
    """A folder with the name of a checkpoint, but no record of what it is."""

    folder: Path
    why: str

    @property
    def step(self) -> int:
        step = step_of(self.folder)
        return -1 if step is None else step


class Checkpoints(Generic[P]):
    """The checkpoints of a run. Public methods but `complete` are collective over the ranks.

    Args:
        root: their folder.
        world: the actor's ranks.
        position_type: makes a position of the values that one consists of.
        keep: how many are kept to resume from.
        keep_every: a step that is a multiple of it is kept for good, in a folder of its own; 0
            keeps none.
        beside_training: write while training goes on, else `save` returns when it is done.
        timeout_s: how long a rank waits for the others' parts.
        is_valid: whether a position is one of this run's plan; a trainer that was superseded may
            have left a checkpoint that is not. Rank 0 asks.
        lacks: what a run lacks by now that would go on from the position of one that was kept for
            good; "" if nothing. Rank 0 asks.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        position_type: Callable[..., P],
        *,
        keep: int,
        keep_every: int = 0,
        beside_training: bool = False,
        timeout_s: float = 1800,
        is_valid: Callable[[P], bool] = lambda _: True,
        lacks: Callable[[P], str] = lambda _: "",
    ) -> None:
        self._root, self._world, self._keep, self._is_valid = root, world, keep, is_valid
        self._lacks = lacks
        self._keep_every, self._beside_training = keep_every, beside_training
        self._position_type, self._timeout_s = position_type, timeout_s
        self._pending: PendingSave | None = None
        self._num_failures = 0

    def save(
        self,
        trainer: TrainingEngine,
        position: P | None,
        check_fenced: Callable[[], None] = lambda: None,
    ) -> list[Saved]:
        """Begins to save, once an earlier save is done; older ones than the `keep` newest go then.

        Args:
            trainer: every rank's.
            position: rank 0's.
            check_fenced: raises if another trainer took over; rank 0 asks before it publishes. It
                is called from another thread.

        Returns:
            Saves that were completed meanwhile.

        Raises:
            CheckpointError: MAX_FAILURES saves in a row failed; names the file.
            FencedError: another trainer took over.
        """
        step = trainer.step
        if self._pending and self._world.rank == 0:
            log.warning(
                "the checkpoint of step %d is still being written: waiting for it before that of "
                "step %d; save less often, or to faster storage",
                self._pending.step, step,
            )  # fmt: skip
        done = self.wait()
        name = f".{_name(step)}.{secrets.token_hex(4)}.draft"
        draft: Path = self._world.bcast(self._root / name)

        def publish() -> None:
            assert position is not None
            write_json(draft / _PROGRESS, {"step": step, "position": list(position)})
            check_fenced()
            self._publish(draft, self._root / _name(step), position)

        self._pending = PendingSave.begin(
            trainer, draft, self._world, publish,
            copy=self._beside_training, timeout_s=self._timeout_s,
        )  # fmt: skip
        return done if self._beside_training else done + self.wait()

    def poll(self) -> list[Saved]:
        """Saves that were completed since one asked last; does not wait. Raises as `save`."""
        return self._take(self._pending.poll()) if self._pending else []

    def wait(self) -> list[Saved]:
        """Does as `poll`, but waits for a save that is going on."""
        return self._take(self._pending.wait()) if self._pending else []

    def complete(self) -> list[Checkpoint[P]]:
        """Returns the checkpoints that count, oldest first; half-written ones have another name."""
        return [found for found in self._found(self._root) if isinstance(found, Checkpoint)]

    def _found(self, root: Path) -> Iterator["Checkpoint[P] | _Unreadable"]:
        for folder in _listed(root, "step_*"):
            try:
                progress = read_json(folder / _PROGRESS)
                if progress is None:
                    raise ValueError("is not there")
                step, position = progress["step"], self._position_type(*progress["position"])
            except (ValueError, TypeError, KeyError, OSError) as error:
                if exists(folder):  # else it was rotated away meanwhile
                    yield _Unreadable(folder, f"{folder / _PROGRESS}: {error}")
                continue
            if self._is_valid(position):
                yield Checkpoint(folder, step, position)
            else:
                log.warning(
                    "%s: is not of this run's plan, or from before all that is left of it; "
                    "it does not count",
                    folder,
                )

    def resume(
        self, trainer: TrainingEngine, on_torn: Callable[[int, str], None] = lambda step, why: None
    ) -> Checkpoint[P] | None:
        """Loads the newest checkpoint that counts and is whole; None if there is none at all.

        Those kept for good come last. Also removes what a save that was killed left behind.

        Args:
            on_torn: told on rank 0 of every one that is passed over: its step, and why.

        Raises:
            BusError: there are some, but none is of this run's plan.
            CheckpointError: there are some of this run's plan, but none is whole.
        """
        if self._world.rank == 0:
            self._remove_left_behind()
        torn: list[Path] = []
        for candidates in (self._candidates, self._kept_for_good):
            for found in self._world.bcast(candidates() if self._world.rank == 0 else []):
                why = found.why if isinstance(found, _Unreadable) else self._load(trainer, found)
                if why is None:
                    if self._world.rank == 0:
                        self._set_aside(torn)
                    return cast(Checkpoint[P], found)
                torn.append(found.folder)
                if self._world.rank == 0:
                    log.error("%s: is not whole and is passed over: %s", found.folder, why)
                    on_torn(found.step, why)
        if torn:
            raise CheckpointError(
                f"{self._root}: none of the {len(torn)} checkpoints is whole: {why}; remove them "
                "to begin again from step 1, if all shards are there still"
            )
        return None

    def _candidates(self) -> list["Checkpoint[P] | _Unreadable"]:
        """Returns what is there, newest first."""
        found = list(self._found(self._root))
        if not found and _listed(self._root, "step_*"):
            raise BusError(
                f"{self._root}: none of the checkpoints is of this run's plan; remove them to "
                "begin again from step 1, if all shards are there still"
            )
        return found[::-1]

    def _kept_for_good(self) -> list["Checkpoint[P] | _Unreadable"]:
        """Returns those that a run can still go on from, newest first."""
        usable = []
        for found in self._found(self._root / _KEPT):
            if isinstance(found, Checkpoint) and (lack := self._lacks(found.position)):
                log.warning("%s: nothing can go on from it: %s", found.folder, lack)
            else:
                usable.append(found)
        if usable:
            log.warning("%s: looking at what is kept for good: none else is whole", self._root)
        return usable[::-1]

    def _load(self, trainer: TrainingEngine, checkpoint: Checkpoint[P]) -> str | None:
        """Returns why it cannot be loaded, the same on all ranks; None: it was."""
        why = trainer.damage(checkpoint.folder) if self._world.rank == 0 else None
        if why := self._world.bcast(why):
            return str(why)
        try:
            trainer.load(checkpoint.folder)
        except CheckpointError as error:
            return str(error)
        return None

    def _take(self, outcome: Saved | CheckpointError | None) -> list[Saved]:
        if outcome is None:
            return []
        assert self._pending is not None
        pending, self._pending = self._pending, None
        if isinstance(outcome, Saved):
            self._num_failures = 0
            return [outcome]
        self._num_failures += 1
        if self._world.rank == 0:
            log.error(
                "the checkpoint of step %d could not be saved (failure %d of %d in a row): %s",
                pending.step, self._num_failures, MAX_FAILURES, outcome,
            )  # fmt: skip
            delete_folder(pending.draft)
        if self._num_failures == MAX_FAILURES:
            raise CheckpointError(f"{MAX_FAILURES} saves in a row failed, the last one: {outcome}")
        return [Saved(pending.step, failure=str(outcome))]

    def _publish(self, draft: Path, folder: Path, position: P) -> None:
        self._refuse_to_replace_newer(folder, position)
        # One of this step is torn, or of a superseded trainer: else the run had resumed from it.
        patiently(folder, lambda: _replace(folder, draft))
        try:
            patiently(self._root, self._rotate, small=True, damage_s=DAMAGE_S)
        except OSError as error:  # the new one is there all the same, and the next will try again
            log.warning("%s: an old checkpoint cannot be removed: %s", self._root, error)

    def _rotate(self) -> None:
        """Removes what is older than the `keep` newest, and what is left of earlier attempts."""
        for old in self.complete()[: -self._keep]:
            if self._keep_every and old.step % self._keep_every == 0:
                kept = self._root / _KEPT / old.folder.name
                kept.parent.mkdir(exist_ok=True)
                _delete(kept)
                old.folder.rename(kept)
            else:
                _delete(old.folder)
        for doomed in _listed(self._root, ".step_*.old"):
            shutil.rmtree(doomed)

    def _refuse_to_replace_newer(self, folder: Path, position: P) -> None:
        if progress := read_json(folder / _PROGRESS):
            fence = self._position_type(*progress["position"]).fence
            if fence > position.fence:
                raise FencedError(
                    f"{folder}: was saved under plan fence {fence}, this trainer's is "
                    f"{position.fence}; another trainer took over, this one must end"
                )

    def _remove_left_behind(self) -> None:
        for path in _listed(self._root, ".step_*"):
            if _LEFT_BEHIND.fullmatch(path.name):
                log.info("%s: a killed process left it behind; removed", path)
                delete_folder(path)

    def _set_aside(self, torn: list[Path]) -> None:
        """Moves torn ones away: they do not count among the kept ones, and can be looked at."""
        for folder in torn:
            aside = self._root / _TORN
            patiently(aside, partial(aside.mkdir, exist_ok=True))
            move(folder, target := aside / f"{folder.name}.{secrets.token_hex(4)}")
            log.warning("%s: moved to %s", folder, target)


def whole(
    root: Path, position_type: Callable[..., P], is_valid: Callable[[P], bool]
) -> list[Checkpoint[P]]:
    """The checkpoints that count, by step, with those that are kept for good."""
    found = [
        checkpoint
        for folder in (root / _KEPT, root)
        for checkpoint in Checkpoints(
            folder, SoloWorld(), position_type, keep=1, is_valid=is_valid
        ).complete()
    ]
    return sorted(found, key=lambda each: each.step)


def find(root: Path, step: int | None) -> Path:
    """Returns the folder of the newest checkpoint or of `step`'s, also one that is kept for good.

    Raises:
        CheckpointError: there is none.
    """
    kept = {
        found: folder
        for folder in (*root.glob(f"{_KEPT}/step_*"), *root.glob("step_*"))
        if (found := step_of(folder)) is not None
    }
    if not kept:
        raise CheckpointError(f"{root}: has no checkpoints")
    if step is None:
        return kept[max(kept)]
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise CheckpointError(f"{root}: has no checkpoint of step {step}; there are {steps}")
    return kept[step]


def _listed(root: Path, pattern: str) -> list[Path]:
    return [root / name for name in names(root) if fnmatchcase(name, pattern)]


def step_of(folder: Path) -> int | None:
    """Returns the step in a checkpoint's name; None if the name is not a checkpoint's."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _replace(folder: Path, draft: Path) -> None:
    """May be called again after it did so and was told otherwise."""
    if draft.exists() or not folder.exists():
        _delete(folder)
        sync(draft)
        draft.rename(folder)
    sync(folder.parent)


def _delete(folder: Path) -> None:
    """Deletes; killed at any moment it leaves a whole checkpoint or one that does not count."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed)
