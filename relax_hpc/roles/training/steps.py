"""The notes of all trainers' loops at the end of a step."""

from typing import Any, Protocol

from relax_hpc.engines.training_engine import Skip
from relax_hpc.roles.training.skips import stop_if_stuck
from relax_hpc.telemetry.timers import Timers


class StepLog(Protocol):
    """The record of steps; rank 0 keeps it, on other ranks it does nothing."""

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        """Logs the step with what it took."""
        ...

    def skipped(self, step: int, skip: Skip) -> None:
        """Notes an update that was not done."""
        ...


class NoLog:
    """The record on ranks that keep none."""

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None: ...
    def skipped(self, step: int, skip: Skip) -> None: ...


def stop_or_go_on(log: StepLog, step: int, skip: Skip | None) -> None:
    """Notes why the update was not done, if it was not; called before anything is made of it.

    Raises:
        TrainingError: it is not worth while to go on.
    """
    if skip is not None:
        log.skipped(step, skip)
        stop_if_stuck(skip)
