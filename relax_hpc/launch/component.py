"""What every task of a run runs: the pickled function, and the frame around it."""

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission

from relax_hpc.errors import RelaxError
from relax_hpc.roles.context import TaskContext

log = logging.getLogger(__name__)

start_count: ContextVar[int] = ContextVar("start_count", default=1)
"""Which start of the step this process belongs to; `entry` sets it from its argument."""

last_start: ContextVar[int] = ContextVar("last_start", default=1)
"""The start after which the step is not run again."""


@dataclass(frozen=True, slots=True)
class Restartable:
    """A function whose failure counts only when its step is not started again."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return self.function(*args, **kwargs)
        except Exception as error:
            is_final = isinstance(error, RelaxError) and error.is_final
            if is_final or start_count.get() >= last_start.get():
                raise
            # An exception would leave a result for submitit, and a waiting submitter would take it
            # for the end. Leaving without one says: not over yet.
            log.exception("start %d failed, the step starts again", start_count.get())
            raise SystemExit(1) from error

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:  # noqa: ANN401
        """Asks submitit to requeue: what a run needs to go on is in the run directory already."""
        return DelayedSubmission(self, *args, **kwargs)


def run(role: str, run_dir: str, bootstrap: str) -> None:
    """Runs one task of `role` until the run is over."""
    from relax_hpc.roles import task as main

    main.run(Path(run_dir), task_context(role), bootstrap)


def task_context(role: str) -> TaskContext:
    """Who this task is, from what Slurm or `local_step` told submitit."""
    environment = JobEnvironment()
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return TaskContext(
        role=role,
        rank=environment.global_rank,
        size=environment.num_tasks,
        local_rank=environment.local_rank,
        attempt=f"{environment.job_id}.{restarts}",
        start=start_count.get(),
        node=environment.hostname,
    )
