"""A run's state for whoever looks at it again and again, with few questions to Slurm."""

import time
from pathlib import Path

from relax_hpc.launch import pending, states
from relax_hpc.launch.script import exit_code_file
from relax_hpc.runs import status
from relax_hpc.runs.status import Launch

ASK_S = 10.0
"""Seconds between questions to Slurm; local processes are looked at each time."""
_ENDING_S = 1.0
"""Likewise, once the job's script has left its exit code."""
_MOVED_S = 600.0
"""An expected start that moved by less is no news."""


class Watch:
    """The state of a run as of now, or as Slurm said it not long ago."""

    def __init__(self, run_dir: Path, *, every_s: float = ASK_S) -> None:
        """Asks nothing yet.

        Args:
            run_dir: of the run.
            every_s: seconds between questions to Slurm.
        """
        self._run_dir, self._every_s = run_dir, every_s
        self._found = list[Launch]()
        self._asked = 0.0
        self._told: Launch | None = None

    def launches(self) -> list[Launch]:
        """Returns every launch of the run, newest first."""
        if not self._found or self._is_due():
            self._found = status.of_run(self._run_dir)
            self._asked = time.monotonic()
        return self._found

    def look(self) -> Launch:
        """Returns the launch whose state is the run's."""
        return status.decisive(self.launches())

    def is_over(self) -> bool:
        return states.is_over(self.look().state)

    def news(self) -> str:
        """Says that the run waits, why and how long, or that it waits no more; once each."""
        found, told = self.look(), self._told
        if not states.is_waiting(found.state):
            self._told = None
            return found.state if told and found.state == "RUNNING" else ""
        if told and (told.state, told.reason) == (found.state, found.reason):
            moved = abs((found.start or 0.0) - (told.start or 0.0))
            if moved < _MOVED_S:
                return ""
        self._told = found
        return waiting(found)

    def _is_due(self) -> bool:
        launch = status.decisive(self._found)
        if launch.record.controller is not None:
            return True
        every_s = self._every_s
        left = (exit_code_file(launch.record.folder, each) for each in launch.record.leaders)
        if any(each.exists() for each in left):
            every_s = min(_ENDING_S, every_s)
        return time.monotonic() - self._asked >= every_s


def waiting(launch: Launch) -> str:
    """A line on a launch that waits: state, Slurm's reason, the same in words, expected start."""
    head = launch.state + (f" ({launch.reason})" if launch.reason else "")
    words = [each for each in (pending.why(launch.reason), pending.when(launch.start)) if each]
    return f"{head}: {'; '.join(words)}" if words else head
