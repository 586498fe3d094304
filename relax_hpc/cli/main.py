"""Verbs only. A command parses, calls one function and prints; heavy imports stay inside.

A file for each group of commands; here are those that start a job.
"""

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer import rich_utils

from relax_hpc import permissions
from relax_hpc.cli.arguments import (
    Ended,
    Job,
    Local,
    Overrides,
    Profile,
    Run,
    find_run,
    going_on,
    load_job,
    names_of_runs,
    run_dir_of,
)
from relax_hpc.cli.bench import bench
from relax_hpc.cli.boards import boards
from relax_hpc.cli.bus import bus
from relax_hpc.cli.data import data, decode_media
from relax_hpc.cli.evaluate import evaluation
from relax_hpc.cli.explain import explained_job
from relax_hpc.cli.init import beginning
from relax_hpc.cli.keys import explained, keys
from relax_hpc.cli.models import models
from relax_hpc.cli.play import play_episode
from relax_hpc.cli.rows_shown import RowsShown
from relax_hpc.cli.runs import runs
from relax_hpc.cli.scale import scale
from relax_hpc.cli.slurm_options import Account, Partition, SlurmOptions, Time
from relax_hpc.cli.viewer import viewer
from relax_hpc.errors import ConfigError, RelaxError

if TYPE_CHECKING:
    from relax_hpc.launch.submit import Submission

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous RL post-training of language models on plain Slurm.",
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"relax-hpc {metadata.version('relax-hpc')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say it and end."),
    ] = False,
) -> None:
    pass


Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the steps until the run ends.")]


_NEXT = "relax_hpc.next"


class _CheckCommand(typer.core.TyperCommand):
    """Takes `--explain` without a key, too, and keeps how to submit with the same arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        given = list(args)
        own = ("--all", "--decode", "--play", "--reply")
        pairs = zip(["", *args], args, strict=False)
        same = [each for last, each in pairs if each.split("=")[0] not in own and last != "--reply"]
        ctx.meta[_NEXT] = shlex.join(["relax-hpc", "submit", *same])
        for place, each in enumerate(args):
            if each == "--explain" and (place + 1 == len(args) or args[place + 1].startswith("-")):
                given[place] = "--explain="
        return super().parse_args(ctx, given)


@app.command(
    cls=_CheckCommand,
    epilog="Example:  relax-hpc check jobs/tiny/arithmetic.toml --set schedule.max_staleness=3",
)
def check(
    ctx: typer.Context,
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    local: Annotated[
        bool, typer.Option("--local", help="Do not ask Slurm, even if it is here.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Only say what this key does, and its value here; without a key, which roles and "
            "columns the job has, and why, and its algorithm.",
        ),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="First decode every image, video and sound of its prompts, on all cores.",
        ),
    ] = False,
    play: Annotated[
        bool,
        typer.Option(
            "--play",
            help="Then play an episode here, in which the policy says its prompt's answer, and "
            "show it: what is given, said, trained on, and its reward.",
        ),
    ] = False,
    replies: Annotated[
        list[str],
        typer.Option(
            "--reply",
            help="With --play: what the policy says; repeatable, the last one again and again.",
        ),
    ] = [],  # noqa: B006
    everything: Annotated[
        bool, typer.Option("--all", help="Print all settings on a terminal, too.")
    ] = False,
    profile: Profile = None,
    account: Account = None,
    partition: Partition = None,
    time: Time = None,
) -> None:
    """Validate a job, the files it names and the cluster; into a file or a pipe, print it with
    every default filled in."""
    from relax_hpc.launch import preflight
    from relax_hpc.launch.submit import expected_start, mode_of, resolve

    asked = SlurmOptions(account, partition, time)
    asked.check(overrides)
    config = asked.of(load_job(job, overrides, profile))
    if explain is not None:
        said = explained(config, explain) if explain else explained_job(config)
        typer.echo("\n".join(said))
        return
    if replies and not play:
        raise ConfigError("--reply: is of an episode; add --play")
    remarks, lacking = list[str](), list[str]()
    try:
        if decode:
            decode_media(config, remarks.append)
        config, components = resolve(config)
        use_slurm = mode_of(local=local) == "slurm"
        config = preflight.check(
            config, components, use_slurm=use_slurm, say=remarks.append, lacks=lacking.append
        )
        if use_slurm:
            remarks.append(expected_start(config, components))
        preflight.check_run_dir(config.run_dir, config.name, say=remarks.append)
        if play:
            play_episode(config, replies, remarks.append)
        if everything or not sys.stdout.isatty():
            typer.echo(config.model_dump_json(indent=2))
    finally:  # last, where they are seen
        for each in (*remarks, *lacking):
            _remark(each)
    if lacking:
        _remark(f"nothing else is wrong; where that is there: {ctx.meta[_NEXT]}")
    else:
        _remark(f"nothing is wrong; next: {ctx.meta[_NEXT]}")


@app.command(
    epilog="Examples:  relax-hpc submit jobs/tiny/arithmetic.toml --set name=try1 --dry-run  |  "
    "relax-hpc submit jobs/tiny/arithmetic.toml --set name=try2 --depend try1"
)
def submit(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script, submit nothing.")
    ] = False,
    local: Local = False,
    follow: Follow = False,
    profile: Profile = None,
    depend: Annotated[
        str | None,
        typer.Option(
            metavar="JOB|RUN",
            help="Begin after that job, or run, has completed.",
            autocompletion=names_of_runs,
        ),
    ] = None,
    account: Account = None,
    partition: Partition = None,
    time: Time = None,
) -> None:
    """Submit every role of a job as one heterogeneous Slurm job, or run it on this machine."""
    from relax_hpc.launch.submit import submit as submit_job

    asked = SlurmOptions(account, partition, time)
    asked.check(overrides)
    if depend is not None:
        overrides = [*overrides, *_dependency(depend, local=local)]
    config = asked.of(load_job(job, overrides, profile))
    with RowsShown() as shown:
        submission = submit_job(config, local=local, dry_run=dry_run, say=_remark, advance=shown)
    if dry_run:
        typer.echo(submission.script)
        return
    _announce(submission, local=local, follow=follow)


@app.command(
    epilog="Examples:  relax-hpc resume arithmetic  |  "
    "relax-hpc resume arithmetic --set actor.resources.time=2-00:00:00  |  "
    "relax-hpc resume arithmetic --set actor.layout.tensor_parallel=2  |  "
    "relax-hpc resume arithmetic --set schedule.num_steps=200"
)
def resume(
    run: Run,
    overrides: Overrides = [],  # noqa: B006
    local: Local = False,
    follow: Follow = False,
    ended: Ended = False,
) -> None:
    """Start a run again that was cancelled or gave up; it goes on from its newest checkpoint.

    --set changes where, how long and in which layout it computes, what it keeps, and
    schedule.num_steps to more: so a complete run goes on, too.
    """
    from relax_hpc.runs.resume import resume as resume_job

    with RowsShown() as shown:
        resumed = resume_job(
            run_dir_of(run),
            overrides=overrides,
            local=local,
            ended=ended,
            say=_remark,
            advance=shown,
        )
    _announce(resumed, local=local, follow=follow)


for commands in (beginning, data, runs, boards, evaluation, viewer, models):
    app.add_typer(commands)
app.command(epilog="Example:  relax-hpc keys actor.optimizer")(keys)
for name, group in {"bus": bus, "scale": scale, "bench": bench}.items():
    app.add_typer(group, name=name)


def _dependency(asked: str, *, local: bool) -> list[str]:
    """The setting of a job that is to begin after another; none if that has completed."""
    from relax_hpc.launch.submit import mode_of
    from relax_hpc.runs import depend

    if mode_of(local=local) == "local":
        raise ConfigError(f"--depend {asked}: only Slurm can wait for another job; leave it out")
    words = depend.on_job(asked)
    if words is None and (words := depend.on_run(run_dir_of(asked))) is None:
        _remark(f"{asked} has completed: nothing to wait for")
    return [f"resources.dependency={words}"] if words else []


def _remark(line: str) -> None:
    """Says something that is not what was asked for, so that this can go into a file."""
    typer.echo(line, err=True)


def _announce(submission: "Submission", *, local: bool, follow: bool) -> None:
    if submission.mode == "local" and not local:
        typer.echo("there is no sbatch here: running on this machine")
    for component, job_id in submission.job_ids.items():
        typer.echo(f"{component + ':':<11}{job_id}")
    typer.echo(f"run directory: {submission.run_dir}")
    if follow:
        _follow_run(submission.run_dir)
    else:
        typer.echo(f"next: relax-hpc status {_name(submission.run_dir)}")


def _name(run_dir: Path) -> str:
    """Calls a run by its name where that is enough on the command line, else by its directory."""
    try:
        found = find_run(run_dir.name)
    except ConfigError:  # several have it
        found = None
    return run_dir.name if found and found.resolve() == run_dir.resolve() else str(run_dir)


def _follow_run(run_dir: Path) -> None:
    """Shows the actor's steps as they come, then what the run has come to."""
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    with going_on(_name(run_dir)):
        for line in report.progress(run_dir):
            typer.echo(line)
    found = run_status.collect(run_dir)
    typer.echo(report.text(found))
    if found.state != "COMPLETED":
        raise typer.Exit(1)


def _check_folder() -> None:
    try:
        Path.cwd()  # paths of a job count from there
    except FileNotFoundError:
        raise ConfigError(
            "the folder that this is run in was removed; cd to one that is there"
        ) from None


def main() -> None:
    """Entry point: what we raise on purpose becomes one line and exit code 2, and so does a file
    that the user may not read or write."""
    os.umask(permissions.UMASKS["none"])  # of what a command writes beside or into a run
    is_plain = bool(os.environ.get("NO_COLOR"))
    if is_plain:  # rich alone would still print bold and dim
        rich_utils.COLOR_SYSTEM = None
    try:
        _check_folder()
        app(prog_name="relax-hpc")
    except (RelaxError, PermissionError) as error:
        if isinstance(error, PermissionError) and error.filename is None:
            raise  # it is about no file
        said = str(error) if isinstance(error, RelaxError) else permissions.refusal(error)
        colours: Literal["auto"] | None = None if is_plain else "auto"
        console = Console(stderr=True, soft_wrap=True, color_system=colours)
        console.print(Text(said, style="red"))
        sys.exit(2)
