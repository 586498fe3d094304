"""A checkpoint that is being written by a thread of every rank, while they train on.

Ranks agree on what became of it at the ends of steps, from their main threads: a collective in the
other threads would have to keep its order among those of training.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from relax_hpc.comm.world import World
from relax_hpc.engines.training_engine import Snapshot, TrainingEngine
from relax_hpc.errors import CheckpointError, FencedError, PeerTimeoutError, RelaxError


class Saved(NamedTuple):
    """What became of a save."""

    step: int
    wait_s: float = 0.0
    """That training waited, for the copy and for what was not written when it had to be."""
    background_s: float = 0.0
    """From the copy to its end."""
    num_bytes: int = 0
    failure: str | None = None


class _Report(NamedTuple):
    """What one rank knows of a save."""

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
        """Takes the snapshot, then writes it in a thread.

        Args:
            publish: makes it the newest checkpoint; rank 0 does.
            copy: training will go on.
        """
        save = cls(trainer.step, draft, world, timeout_s)
        snapshot = None
        try:
            snapshot = trainer.snapshot(copy=copy)
        except CheckpointError as error:  # e.g. no memory for the copy, on this rank
            save._error = error
            save._written.set()
            save._ended.set()
        save._begun = time.monotonic()
        save._wait_s = save._begun - save._over
        if snapshot is not None:
            threading.Thread(
                target=save._run, args=(snapshot, publish), name="checkpoint", daemon=True
            ).start()
        return save

    def poll(self) -> Saved | CheckpointError | None:
        """What became of it; None if it is going on. The same on all ranks.

        Raises:
            FencedError: another trainer took over.
        """
        return self._agree()

    def wait(self) -> Saved | CheckpointError:
        """As `poll`, once it has ended."""
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
        came = event.wait(self._timeout_s)
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

    def _run(self, snapshot: Snapshot, publish: Callable[[], None]) -> None:
        try:
            self.draft.mkdir(parents=True, exist_ok=True)
            snapshot.write(self.draft)
            self._written.set()
            if self._world.rank == 0:
                self._num_bytes = snapshot.write_names(
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
