"""Records in the run directory whether a task has work.

If the sides of a run are separate jobs, a side without work gives its nodes back (`launch.holder`).
Rollout tasks and the actor's rank 0 report; the others work for these.
"""

import time
from pathlib import Path
from typing import Self

from relax_hpc.config.run import RunConfig
from relax_hpc.roles.context import TaskContext
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths

SETTLED_S = 1.0
"""Seconds without work before that is recorded: shorter breaks are not worth a record."""


class Idle:
    """Reports for one task, in one attempt of its job."""

    def __init__(self, path: Path | None) -> None:
        """Reports work; with no path it reports nothing."""
        self._path, self._since, self._is_said = path, 0.0, False
        self._say(None)

    @classmethod
    def of(cls, config: RunConfig, paths: RunPaths, context: TaskContext) -> Self:
        is_asked = config.launch.layout == "separate"
        return cls(paths.idle(context.attempt, context.name) if is_asked else None)

    def note(self, *, idle: bool) -> None:
        """Takes the current state; cheap to call."""
        now = time.time()
        if not idle:
            self._since = 0.0
            if self._is_said:
                self._say(None)
        elif not self._since:
            self._since = now
        elif not self._is_said and now - self._since >= SETTLED_S:
            self._say(self._since)

    def _say(self, since: float | None) -> None:
        self._is_said = since is not None
        if self._path:
            write_json(self._path, {"since": since})
