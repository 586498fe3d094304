"""Jobs and runs that another job waits for: `submit --depend`."""

import re
from pathlib import Path

from relax_hpc.errors import ConfigError
from relax_hpc.launch import states
from relax_hpc.runs import status


def on_job(asked: str) -> str | None:
    """Slurm's words for "after these jobs have completed"; those of a user who writes them are
    left as they are. None of what is no job."""
    if re.fullmatch(r"\d+(,\d+)*", asked):
        return f"afterok:{asked.replace(',', ':')}"
    if ":" in asked or asked == "singleton":
        return asked
    return None


def on_run(run_dir: Path) -> str | None:
    """Slurm's words for "after this run has completed"; None if it has.

    Raises:
        ConfigError: it cannot complete any more as it is, or Slurm does not know it.
    """
    launch = status.decisive(status.of_run(run_dir))
    key = f"--depend {run_dir.name}"
    if launch.state == "COMPLETED":
        return None
    if launch.record.controller is not None:
        raise ConfigError(f"{key}: runs without Slurm, which cannot wait for it; submit later")
    if states.is_over(launch.state):
        raise ConfigError(
            f"{key}: is {launch.state}, so nothing would ever begin; resume it first, or leave "
            "--depend out"
        )
    return f"afterok:{':'.join(launch.record.leaders)}"
