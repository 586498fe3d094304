"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.errors import ConfigError

Job = Annotated[Path, typer.Argument(help="A job file, see jobs/.", show_default=False)]
Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Ended = Annotated[
    bool, typer.Option("--ended", help="I know that its job has ended, though Slurm cannot say so.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value; repeatable.", show_default=False)
]


def run_dir_of(run: str) -> Path:
    """Finds the directory of a run that is named on the command line."""
    if (found := find_run(run)) is not None:
        return found
    raise ConfigError(f"{run}: no such run; give a run directory, or a name under runs/")


def find_run(run: str) -> Path | None:
    """Does as `run_dir_of`; None if there is no such run."""
    places = (Path(run), Path("runs") / run)
    return next((place for place in places if (place / "run.json").is_file()), None)
