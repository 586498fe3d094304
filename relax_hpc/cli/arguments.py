"""Arguments and options that several commands have."""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc import permissions
from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.printable import argument

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig


def names_of_runs(incomplete: str) -> list[str]:
    """Names of runs that begin so, for the completion of a shell."""
    from relax_hpc.launch import known_runs

    names = {run.name for run in known_runs.everywhere()}
    return sorted(name for name in names if name.startswith(incomplete))


Job = Annotated[Path, typer.Argument(help="A job file, see jobs/.", show_default=False)]
Run = Annotated[
    str,
    typer.Argument(help="Name of a run, or its directory; see ls.", autocompletion=names_of_runs),
]
Ended = Annotated[
    bool, typer.Option("--ended", help="I know that its job has ended, though Slurm cannot say so.")
]
Local = Annotated[bool, typer.Option("--local", help="Run on this machine even if Slurm is here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value; repeatable.", show_default=False)
]
Profile = Annotated[
    str | None,
    typer.Option(help="Site profile, in place of the job's launch.profile.", show_default=False),
]


def load_job(job: Path, overrides: Sequence[str], profile: str | None = None) -> "JobConfig":
    """Reads a job file; where it names no `run_root`, $RELAX_RUN_ROOT does.

    Args:
        job: the file.
        overrides: section.key=value.
        profile: in place of the job's.

    Raises:
        ConfigError: of the job, one line per mistake.
    """
    from relax_hpc import job_file
    from relax_hpc.launch import known_runs

    config, root = job_file.load(job, overrides), known_runs.default_root()
    if profile is not None:
        launch = config.launch.model_copy(update={"profile": profile})
        config = config.model_copy(update={"launch": launch})
    if root is None or "run_root" in config.model_fields_set:
        return config
    return config.model_copy(update={"run_root": root})


def run_dir_of(run: str) -> Path:
    """Finds the directory of a run that is named on the command line.

    Raises:
        ConfigError: there is no such run, or several.
    """
    from relax_hpc.launch import known_runs

    if (found := find_run(run)) is not None:
        return found
    names = {each.name for each in known_runs.everywhere()}
    close = difflib.get_close_matches(run, names, n=1)
    hint = f"did you mean {close[0]}?" if close else "give its directory, or a name that ls shows"
    raise ConfigError(f"{run}: no such run; {hint}")


def find_run(run: str) -> Path | None:
    """Finds a run by its directory, or by its name: below runs/, below $RELAX_RUN_ROOT, or
    wherever it was submitted. None if there is no such run.

    Raises:
        ConfigError: several runs that were submitted elsewhere have that name, or it is a folder
            that this user may not look into.
    """
    from relax_hpc.launch import known_runs

    places = (Path(run), known_runs.RUNS / run)
    for place in places:
        if known_runs.is_run(place):
            return place
    found = known_runs.called(run)
    if len(found) > 1:
        several = ", ".join(map(str, found))
        raise ConfigError(f"{run}: is the name of several runs; give one of {several}")
    if not found:
        for place in places:
            _check_visible(place)
    return found[0] if found else None


def _check_visible(folder: Path) -> None:
    try:
        RunPaths(folder).config.stat()
    except PermissionError as error:
        raise ConfigError(permissions.refusal(error)) from error
    except OSError:  # nothing is there
        return


@contextmanager
def going_on(run: str) -> Iterator[None]:
    """Within it Ctrl-C ends the command, which says that the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"\n{run} goes on; look again with relax-hpc watch {argument(run)}, end it with "
            f"relax-hpc cancel {argument(run)}",
            err=True,
        )
        raise typer.Exit(130) from None
