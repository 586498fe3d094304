"""Defines arguments and options shared by several commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from relax_hpc.cli.completion import names_of_profiles, names_of_runs, settings
from relax_hpc.cli.lines import echo
from relax_hpc.errors import ConfigError
from relax_hpc.launch import known_runs
from relax_hpc.launch.known_runs import find_run as find_run
from relax_hpc.launch.known_runs import own_run_dir_of as own_run_dir_of
from relax_hpc.launch.known_runs import run_dir_of as run_dir_of
from relax_hpc.runtime.text import argument

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig

Job = Annotated[Path, typer.Argument(help="A job file; init makes one.", show_default=False)]
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
    list[str],
    typer.Option(
        "--set",
        help="section.key=value; repeatable.",
        show_default=False,
        autocompletion=settings,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Site profile, in place of the job's launch.profile.",
        show_default=False,
        autocompletion=names_of_profiles,
    ),
]
Account = Annotated[
    str | None,
    typer.Option("--account", "-A", help="Charge this one: resources.account.", show_default=False),
]
Partition = Annotated[
    str | None,
    typer.Option("--partition", "-p", help="Run there: resources.partition.", show_default=False),
]
Time = Annotated[
    str | None,
    typer.Option("--time", "-t", help="Time limit: resources.time.", show_default=False),
]  # fmt: skip


def load_job(job: Path, overrides: Sequence[str], profile: str | None = None) -> "JobConfig":
    """Reads a job file; $RELAX_RUN_ROOT is the default `run_root`.

    Args:
        overrides: section.key=value.
        profile: overrides the job's.

    Raises:
        ConfigError: of the job, one line per mistake.
    """
    from relax_hpc.config import job_file

    config = known_runs.below_default_root(job_file.load(job, overrides))
    if profile is None:
        return config
    launch = config.launch.model_copy(update={"profile": profile})
    return config.model_copy(update={"launch": launch})


@contextmanager
def going_on(run: str) -> Iterator[None]:
    """Lets Ctrl-C end the command with the remark that the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        echo(
            f"\n{run} goes on; look again with relax-hpc watch {argument(run)}, end it with "
            f"relax-hpc cancel {argument(run)}",
            err=True,
        )
        raise typer.Exit(130) from None


class SlurmOptions(NamedTuple):
    """Options of sbatch for all components; None if absent."""

    account: str | None
    partition: str | None
    time: str | None

    def check(self, overrides: Sequence[str]) -> None:
        """Raises:
        ConfigError: a setting has the same meaning as an option.
        """
        set_too = {each.partition("=")[0].strip(): each for each in overrides}
        for name, value in self._options.items():
            if (key := f"resources.{name}") in set_too:
                raise _clash(name, value, f"--set {set_too[key]} says so, too; leave one out")

    def of(self, config: "JobConfig") -> "JobConfig":
        """Returns a job with these requests in place of its own, as with sbatch.

        Raises:
            ConfigError: one of its components requests something else.
        """
        from relax_hpc.roles import table

        for name, value in self._options.items():
            for _, place in table.places(config):
                own = getattr(place.resources, name)
                says_so = place.beside is None and name in place.resources.model_fields_set
                if says_so and own != value:
                    key = f"{place.section}.resources.{name}" if place.section else place.component
                    raise _clash(name, value, f"the job has {key} = {own!r}; change it with --set")
        shared = config.resources.model_copy(update=self._options)
        return config.model_copy(update={"resources": shared})

    @property
    def _options(self) -> dict[str, str]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _clash(name: str, value: str, why: str) -> ConfigError:
    return ConfigError(f"--{name} {value}: {why}")
