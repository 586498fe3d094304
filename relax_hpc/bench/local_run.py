"""A run that a bench submits to this machine, and leaves nothing of."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_hpc.errors import ConfigError
from relax_hpc.launch import states
from relax_hpc.runs import cancel, status


def clear(run_dir: Path) -> None:
    """Ends and removes what a command that was broken off left there."""
    if run_dir.exists():
        with suppress(ConfigError):
            cancel.cancel(run_dir)
        shutil.rmtree(run_dir)


@contextmanager
def followed(run_dir: Path) -> Iterator[None]:
    """Ends the run at the end of the block, if it is not over by then."""
    try:
        yield
    finally:
        if not states.is_over(status.job_state(run_dir)):
            cancel.cancel(run_dir)
