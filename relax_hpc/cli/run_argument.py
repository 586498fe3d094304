"""How a command is told which run."""

from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.errors import ConfigError

Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Ended = Annotated[
    bool, typer.Option("--ended", help="I know that its job has ended, though Slurm cannot say so.")
]


def run_dir_of(run: str) -> Path:
    """Of a run that is named on the command line."""
    for candidate in (Path(run), Path("runs") / run):
        if (candidate / "run.json").is_file():
            return candidate
    raise ConfigError(f"{run}: no such run; give a run directory, or a name under runs/")
