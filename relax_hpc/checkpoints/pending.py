"""A checkpoint that is being written by a thread of every rank, while they train on.

Ranks agree on what became of it at the ends of steps, from their main threads: a collective in the
other threads would have to keep its order among those of training.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from relax_hpc import heartbeat
from relax_hpc.comm.world import World
from relax_hpc.engines.training_engine import CheckpointPart, TrainingEngine
from relax_hpc.errors import CheckpointError, FencedError, PeerTimeoutError, RelaxError
from relax_hpc.storage import is_short, patiently

log = logging.getLogger(__name__)

_ROOM_S = 10.0
"""Interval of looks whether there is room again."""


class Saved(NamedTuple):
    """A save that has ended."""

    step: int
    wait_s: float = 0.0
    """Time that training waited, for the copy and for what was not written when it had to be."""
    background_s: float = 0.0
    """Time from the copy to the end of the save."""
    num_bytes: int = 0
    failure: str | None = None


class _Report(NamedTuple):
    """The state of a save on one rank."""

    written: bool
    error: RelaxError | None
    done: Saved | None


class PendingSave:
    """One save; every rank has one, and asks it in the same order."""

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
            publish: makes it the newest checkpoint; rank 0 does.
            copy: training will go on.

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
        """Returns the outcome, the same on all ranks; None if it is going on.

        Raises:
            FencedError: another trainer took over.
        """
        return self._agree()

    def wait(self) -> Saved | CheckpointError:
        """Waits for the end, and returns the outcome as `poll`."""
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
        reports: list[_Report] = self._world.allgather(self._report())
        errors = [report.error for report in reports if report.error]
        if not errors:
            return reports[0].done if all(report.written for report in reports) else None
        self._cancelled.set()  # rank 0 may be waiting for parts
        self._expect(self._ended)  # nobody touches the folder or the copy any more
        for error in errors:
            if isinstance(error, FencedError):
                raise error
        return CheckpointError(str(errors[0]))

    def _report(self) -> _Report:
        done = None
        if self._world.rank == 0 and self._ended.is_set() and self._error is None:
            seconds = self._over - self._begun
            done = Saved(self.step, self._wait_s, seconds, self._num_bytes)
        return _Report(self._written.is_set(), self._error, done)

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
