"""Stores checkpoints: model, optimizer, schedule and data position, as one atomic unit.

A checkpoint is written beside training, by a thread of every rank. Threads share files, not a
process group: ranks put their parts into a folder of a temporary name, and rank 0 renames it when
all of them are on disk. At the end of each step training checks for completion or errors.

Ranks agree on the outcome at the ends of steps, from their main threads: a collective in the other
threads would have to keep its order among those of training.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, cast

from relax_hpc.errors import (
    BusError,
    CheckpointError,
    FencedError,
    PeerTimeoutError,
    RelaxError,
    without_number,
)
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import SoloWorld, World
from relax_hpc.runtime.files.records import read_json, sync, write_json
from relax_hpc.runtime.files.storage import (
    DAMAGE_S,
    delete_folder,
    exists,
    is_short,
    move,
    names,
    patiently,
)
from relax_hpc.trainer.checkpoints.best import BEST, KEPT, by_step
from relax_hpc.trainer.training_engine import CheckpointPart, TrainingEngine

log = logging.getLogger(__name__)

_ROOM_S = 10.0
"""Interval of checks whether there is room again."""


class Saved(NamedTuple):
    step: int
    wait_s: float = 0.0
    """Time that training waited, for the copy and for unfinished writes."""
    background_s: float = 0.0
    num_bytes: int = 0
    failure: str | None = None


class _SaveState(NamedTuple):
    written: bool
    error: RelaxError | None
    done: Saved | None


class PendingSave:
    """One save; every rank has one, and calls it in the same order."""

    def __init__(self, step: int, draft: Path, world: World, timeout_s: float) -> None:
        self.step, self.draft = step, draft
        self._world, self._timeout_s = world, timeout_s
        self._written, self._ended = threading.Event(), threading.Event()
        self._cancelled = threading.Event()
        self._error: RelaxError | None = None
        self._wait_s, self._num_bytes = 0.0, 0
        self._begun = self._over = time.monotonic()

    @classmethod
    def begin(
        cls,
        trainer: TrainingEngine,
        draft: Path,
        world: World,
        publish: Callable[[], None],
        *,
        copy: bool,
        timeout_s: float,
    ) -> Self:
        """Takes this rank's part of the checkpoint, then writes it in a thread.

        A rank without memory for a copy returns when its part is written.

        Args:
            publish: makes it the newest checkpoint; called on rank 0.

        Raises:
            PeerTimeoutError: without a copy, the file system does not answer.
        """
        save, has_copy = cls(trainer.step, draft, world, timeout_s), copy
        try:
            part = trainer.checkpoint_part(copy=copy)
        except CheckpointError as error:
            log.warning("step %d: %s; training waits until this rank has written", save.step, error)
            part, has_copy = trainer.checkpoint_part(copy=False), False
        save._begun = time.monotonic()
        save._wait_s = save._begun - save._over
        thread = threading.Thread(
            target=save._run, args=(part, publish), name="checkpoint", daemon=True
        )
        thread.start()
        if not has_copy:
            save._expect(save._written)
        return save

    def poll(self) -> Saved | CheckpointError | None:
        """Returns the outcome, the same on all ranks; None while it is being written.

        Raises:
            FencedError: another trainer took over.
        """
        return self._agree()

    def wait(self) -> Saved | CheckpointError:
        # Where another rank failed to write, rank 0 would wait for its part in vain.
        self._expect(self._written)
        outcome = self._agree()
        if outcome is None:
            self._expect(self._ended)
            outcome = self._agree()
        assert outcome is not None
        return outcome

    def _expect(self, event: threading.Event) -> None:
        begun = time.monotonic()
        with heartbeat.phase("checkpoint to be written", waits=True):
            came = event.wait(self._timeout_s)
            while not came and is_short():  # it holds until there is room
                came = event.wait(min(self._timeout_s, _ROOM_S))
        self._wait_s += time.monotonic() - begun
        if not came:
            raise PeerTimeoutError(
                f"{self.draft}: was not written within {self._timeout_s:.0f} s: the file system "
                "does not answer"
            )

    def _agree(self) -> Saved | CheckpointError | None:
        reports: list[_SaveState] = self._world.allgather(self._report())
        errors = [report.error for report in reports if report.error]
        if not errors:
            return reports[0].done if all(report.written for report in reports) else None
        self._cancelled.set()  # rank 0 may be waiting for parts
        self._expect(self._ended)  # nobody touches the folder or the copy any more
        for error in errors:
            if isinstance(error, FencedError):
                raise error
        return CheckpointError(str(errors[0]))

    def _report(self) -> _SaveState:
        done = None
        if self._world.rank == 0 and self._ended.is_set() and self._error is None:
            seconds = self._over - self._begun
            done = Saved(self.step, self._wait_s, seconds, self._num_bytes)
        return _SaveState(self._written.is_set(), self._error, done)

    def _make_draft(self) -> None:
        if is_short():  # a part that finds no room when it is flushed is lost: rather wait for it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.draft))
        self.draft.mkdir(parents=True, exist_ok=True)

    def _run(self, part: CheckpointPart, publish: Callable[[], None]) -> None:
        try:
            patiently(self.draft, self._make_draft)
            part.write(self.draft)
            self._written.set()
            if self._world.rank == 0:
                self._num_bytes = part.write_names(
                    self.draft, timeout_s=self._timeout_s, cancelled=self._cancelled.is_set
                )
                publish()
        except RelaxError as error:
            self._error = error
        except OSError as error:
            where = error.filename or self.draft
            self._error = CheckpointError(f"{where}: cannot be written: {error.strerror}")
        except BaseException as error:
            self._error = CheckpointError(f"{self.draft}: {type(error).__name__}: {error}")
            raise  # a bug: with its traceback, in the log of this thread
        finally:
            self._over = time.monotonic()
            self._written.set()
            self._ended.set()


MAX_FAILURES = 3
"""Consecutive failed saves that end the actor."""
_PROGRESS = "progress.json"
_NAME = re.compile(r"step_(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.step_\d+\.[0-9a-f]+\.(draft|old)")
_TORN = "torn"


class Position(Protocol):
    """The position of a run in the data: a named tuple of JSON values."""

    @property
    def fence(self) -> int:
        """Fence of the plan; never falls along a run."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


P = TypeVar("P", bound=Position)


class Checkpoint(NamedTuple, Generic[P]):
    """A complete folder: it got its name when everything was in it."""

    folder: Path
    step: int
    position: P


class _Unreadable(NamedTuple):
    """A folder with the name of a checkpoint, but without a record."""

    folder: Path
    why: str

    @property
    def step(self) -> int:
        step = step_of(self.folder)
        return -1 if step is None else step


class Checkpoints(Generic[P]):
    """The checkpoints of a run. Public methods but `complete` are collective over the ranks.

    Args:
        keep_every: multiples of this step are kept for good, in a folder of their own; 0 keeps
            none.
        best: returns which of some steps stay in `best/`, unless they are kept anyway; None keeps
            none, and leaves that folder alone. Called on rank 0.
        beside_training: whether to write while training continues, or before `save` returns.
        timeout_s: how long a rank waits for the others' parts.
        is_valid: whether a position is on this run's plan; a superseded trainer may have left a
            checkpoint that is not. Called on rank 0.
        lacks: returns what a run would lack if it continued from a checkpoint kept for good; "" if
            nothing. Called on rank 0.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        position_type: Callable[..., P],
        *,
        keep: int,
        keep_every: int = 0,
        best: Callable[[Collection[int]], Collection[int]] | None = None,
        beside_training: bool = False,
        timeout_s: float = 1800,
        is_valid: Callable[[P], bool] = lambda _: True,
        lacks: Callable[[P], str] = lambda _: "",
    ) -> None:
        self._root, self._world, self._keep, self._is_valid = root, world, keep, is_valid
        self._lacks = lacks
        self._keep_every, self._best, self._beside_training = keep_every, best, beside_training
        self._position_type, self._timeout_s = position_type, timeout_s
        self._pending: PendingSave | None = None
        self._num_failures = 0

    def save(
        self,
        trainer: TrainingEngine,
        position: P | None,
        check_fenced: Callable[[], None] = lambda: None,
    ) -> list[Saved]:
        """Begins a save, once an earlier one is done; then deletes all but the `keep` newest.

        Args:
            position: on rank 0.
            check_fenced: raises if another trainer took over; rank 0 calls it before it publishes,
                from another thread.

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
        """Returns saves completed since the last call; does not wait. Raises as `save`."""
        return self._take(self._pending.poll()) if self._pending else []

    def wait(self) -> list[Saved]:
        """Does as `poll`, but waits for an unfinished save."""
        return self._take(self._pending.wait()) if self._pending else []

    def complete(self) -> list[Checkpoint[P]]:
        """Returns the valid checkpoints, oldest first; half-written ones have another name."""
        return [found for found in self._find(self._root) if isinstance(found, Checkpoint)]

    def _find(self, root: Path) -> Iterator["Checkpoint[P] | _Unreadable"]:
        for folder in _list(root, "step_*"):
            try:
                progress = read_json(folder / _PROGRESS)
                if progress is None:
                    raise ValueError("is not there")
                step, position = progress["step"], self._position_type(*progress["position"])
            except (ValueError, TypeError, KeyError, OSError) as error:
                if exists(folder):  # else it was rotated away meanwhile
                    yield _Unreadable(folder, f"{folder / _PROGRESS}: {without_number(error)}")
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
        """Loads the newest valid and complete checkpoint; None if there is none at all.

        Those kept for good come last. Also deletes the remains of killed saves.

        Args:
            on_torn: called on rank 0 with the step of every damaged one, and the reason.

        Raises:
            BusError: there are some, but none is of this run's plan.
            CheckpointError: there are some of this run's plan, but none is complete.
        """
        if self._world.rank == 0:
            self._remove_left_behind()
        torn: list[Path] = []
        for candidates in (self._candidates, self._list_kept):
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
        found = list(self._find(self._root))
        if not found and _list(self._root, "step_*"):
            raise BusError(
                f"{self._root}: none of the checkpoints is of this run's plan; remove them to "
                "begin again from step 1, if all shards are there still"
            )
        return found[::-1]

    def _list_kept(self) -> list["Checkpoint[P] | _Unreadable"]:
        """Returns those that a run can still continue from, newest first."""
        usable = []
        aside = [each for name in (BEST, KEPT) for each in self._find(self._root / name)]
        for found in sorted(aside, key=lambda each: each.step):
            if isinstance(found, Checkpoint) and (lack := self._lacks(found.position)):
                log.warning("%s: nothing can go on from it: %s", found.folder, lack)
            else:
                usable.append(found)
        if usable:
            log.warning("%s: looking at what is kept for good: none else is whole", self._root)
        return usable[::-1]

    def _load(self, trainer: TrainingEngine, checkpoint: Checkpoint[P]) -> str | None:
        """Loads a checkpoint; returns why it could not, the same on all ranks, or None."""
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
        self.prune()

    def prune(self) -> None:
        """Deletes on rank 0 all but those that are to stay, as every save does at its end."""
        try:
            patiently(self._root, self._rotate, small=True, damage_s=DAMAGE_S)
        except OSError as error:  # the new one is there all the same, and the next will try again
            log.warning("%s: an old checkpoint cannot be removed: %s", self._root, error)

    def _rotate(self) -> None:
        """Deletes all but the `keep` newest and the best, and the remains of earlier attempts.

        Killed at any moment, it leaves the best: that moves by a rename.
        """
        found, best = self.complete(), self._choose_best()
        for old in found[: -self._keep]:
            if self._keep_every and old.step % self._keep_every == 0:
                _put_aside(old.folder, self._root / KEPT)
            elif old.step in best:
                _put_aside(old.folder, self._root / BEST)
            else:
                _delete(old.folder)
        if self._best is not None:
            for old_best in _list(self._root / BEST, "step_*"):
                if step_of(old_best) not in best:
                    _delete(old_best)
        for root in (self._root, self._root / BEST):
            for doomed in _list(root, ".step_*.old"):
                shutil.rmtree(doomed)

    def _choose_best(self) -> Collection[int]:
        if self._best is None:
            return ()
        roots = (self._root, self._root / BEST, self._root / KEPT)
        steps = {step_of(folder) for root in roots for folder in _list(root, "step_*")}
        return self._best([step for step in steps if step is not None])

    def _refuse_to_replace_newer(self, folder: Path, position: P) -> None:
        if progress := read_json(folder / _PROGRESS):
            fence = self._position_type(*progress["position"]).fence
            if fence > position.fence:
                raise FencedError(
                    f"{folder}: was saved under plan fence {fence}, this trainer's is "
                    f"{position.fence}; another trainer took over, this one must end"
                )

    def _remove_left_behind(self) -> None:
        for path in _list(self._root, ".step_*"):
            if _LEFT_BEHIND.fullmatch(path.name):
                log.info("%s: a killed process left it behind; removed", path)
                delete_folder(path)

    def _set_aside(self, torn: list[Path]) -> None:
        """Moves damaged ones away: they do not count among the kept ones, and can be inspected."""
        for folder in torn:
            aside = self._root / _TORN
            patiently(aside, partial(aside.mkdir, exist_ok=True))
            move(folder, target := aside / f"{folder.name}.{secrets.token_hex(4)}")
            log.warning("%s: moved to %s", folder, target)


def whole(
    root: Path, position_type: Callable[..., P], is_valid: Callable[[P], bool]
) -> list[Checkpoint[P]]:
    """Returns the valid checkpoints, by step, including those kept for good and the best."""
    found = [
        checkpoint
        for folder in (root / BEST, root / KEPT, root)
        for checkpoint in Checkpoints(
            folder, SoloWorld(), position_type, keep=1, is_valid=is_valid
        ).complete()
    ]
    return sorted(found, key=lambda each: each.step)


def find(root: Path, step: int | None) -> Path:
    """Returns the folder of the newest checkpoint or of `step`'s, also one kept for good or as the
    best.

    Raises:
        CheckpointError: there is none.
    """
    kept = by_step(root)
    if not kept:
        raise CheckpointError(f"{root}: has no checkpoints")
    if step is None:
        return kept[max(kept)]
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise CheckpointError(f"{root}: has no checkpoint of step {step}; there are {steps}")
    return kept[step]


def _list(root: Path, pattern: str) -> list[Path]:
    return [root / name for name in names(root) if fnmatchcase(name, pattern)]


def step_of(folder: Path) -> int | None:
    """Returns the step in a checkpoint's name; None if the name is not a checkpoint's."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _replace(folder: Path, draft: Path) -> None:
    """Renames the draft; may be repeated if it succeeded but reported an error."""
    if draft.exists() or not folder.exists():
        _delete(folder)
        sync(draft)
        draft.rename(folder)
    sync(folder.parent)


def _put_aside(folder: Path, root: Path) -> None:
    root.mkdir(exist_ok=True)
    _delete(root / folder.name)
    folder.rename(root / folder.name)


def _delete(folder: Path) -> None:
    """Deletes; if killed, leaves a complete checkpoint or an invalid one."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed)
