"""Whether a task has something to do, said in the run directory.

Where the sides of a run are jobs of their own, a side whose tasks have nothing to do gives its
nodes back (`launch.sides`). Rollout tasks and the actor's rank 0 say how it is; the others work for
these.
"""

import time
from pathlib import Path
from typing import Self

from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.roles.context import TaskContext

SETTLED_S = 1.0
"""Seconds without work after which there is said to be none: a moment is not worth a record."""


class Idle:
    """The word of one task, in one attempt of its job."""

    def __init__(self, path: Path | None) -> None:
        """Says that there is work; with no path it says nothing at all."""
        self._path, self._since, self._is_said = path, 0.0, False
        self._say(None)

    @classmethod
    def of(cls, config: RunConfig, paths: RunPaths, context: TaskContext) -> Self:
        is_asked = config.launch.layout == "separate"
        return cls(paths.idle(context.attempt, context.name) if is_asked else None)

    def note(self, *, idle: bool) -> None:
        """Takes how it is; may be called as often as one likes."""
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
