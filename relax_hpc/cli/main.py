"""Defines the command line and the commands that start a job.

A command parses, calls one function and prints; heavy imports stay inside.
"""

import logging
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_hpc.cli.arguments import (
    Account,
    Ended,
    Job,
    Local,
    Overrides,
    Partition,
    Profile,
    Run,
    SlurmOptions,
    Time,
    find_run,
    going_on,
    load_job,
    run_dir_of,
)
from relax_hpc.cli.bench.commands import bench
from relax_hpc.cli.bus import bus
from relax_hpc.cli.chat import talking
from relax_hpc.cli.completion import names_of_keys, names_of_runs, settings
from relax_hpc.cli.data import data, decode_media, play_episode
from relax_hpc.cli.evaluate import evaluation
from relax_hpc.cli.init import beginning, models
from relax_hpc.cli.lines import PlainGroup, RowsShown, echo, echo_styled
from relax_hpc.cli.runs import boards, runs, scale, viewer
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.runtime import text
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.scratch import use_private_folder
from relax_hpc.runtime.text import printable

if TYPE_CHECKING:
    from relax_hpc.launch.submit import Submission

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous RL post-training of language models on plain Slurm.",
)


def _say_version(asked: bool) -> None:
    if asked:
        echo(f"relax-hpc {metadata.version('relax-hpc')}")
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
    """Allows `--explain` without a key, and keeps the arguments for the hint how to submit."""

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
    epilog="Example:  relax-hpc check first.toml --set schedule.max_staleness=3",
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
            autocompletion=names_of_keys,
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
            help="With --play: the policy's reply; repeatable, the last one repeats.",
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
    from relax_hpc.launch.submit import estimate_start, mode_of, resolve

    asked = SlurmOptions(account, partition, time)
    asked.check(overrides)
    config = asked.of(load_job(job, overrides, profile))
    if explain is not None:
        from relax_hpc.cli.keys import explain_job, explain_section

        said = explain_section(config, explain) if explain else explain_job(config)
        echo("\n".join(said))
        return
    if replies and not play:
        raise ConfigError("--reply: is of an episode; add --play")
    remarks, lacking = list[str](), list[str]()
    try:
        if decode:
            decode_media(config, remarks.append)
        config, components = resolve(preflight.with_free_name(config, remarks.append))
        use_slurm = mode_of(local=local) == "slurm"
        config = preflight.check(
            config, components, use_slurm=use_slurm, say=remarks.append, lacks=lacking.append
        )
        preflight.tell_costs(config, components, remarks.append)
        if use_slurm:
            remarks.append(estimate_start(config, components))
        preflight.check_run_dir(config.run_dir, say=remarks.append)
        if play:
            play_episode(config, replies, remarks.append)
        if everything or not sys.stdout.isatty():
            echo(config.model_dump_json(indent=2))
    finally:  # last, where they are seen
        for each in (*remarks, *lacking):
            _remark(each)
    if lacking:
        _remark(f"nothing else is wrong; where that is there: {ctx.meta[_NEXT]}")
    else:
        _remark(f"nothing is wrong; next: {ctx.meta[_NEXT]}")


@app.command(
    epilog="Examples:  relax-hpc submit first.toml --set name=try1 --dry-run  |  "
    "relax-hpc submit first.toml --set name=try2 --depend try1"
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
        echo(submission.script)
        return
    _announce(submission, local=local, follow=follow)


@app.command(
    epilog="Example:  relax-hpc sweep sort.toml --set actor.optimizer.lr=1e-6,3e-6 --seeds 3"
)
def sweep(
    job: Job,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="section.key=value[,value...]; repeatable: a grid of them.",
            show_default=False,
            autocompletion=settings,
        ),
    ] = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from the job's seed on.")] = 1,
    at_once: Annotated[int, typer.Option(min=1, help="Most runs at once.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, submit nothing.")] = False,
    local: Local = False,
    profile: Profile = None,
) -> None:
    """Submit a job with every combination of some settings, and several seeds.

    All are checked before the first is submitted. `ls --tag` and `compare --tag` with the job's
    name show them.
    """
    from relax_hpc.runs import sweep as sweeps

    first = load_job(job, [each for each in overrides if "," not in each], profile)
    points = sweeps.plan(first.name, first.seed, overrides, seeds)
    jobs = [load_job(job, [*each.overrides, f"name={each.name}"], profile) for each in points]
    if dry_run:
        sweeps.check(jobs, local=local, say=_remark)
        echo("\n".join(each.name for each in points))
        return
    started = sweeps.submit(jobs, at_once=at_once, tag=first.name, local=local, say=_remark)
    for number, run_dir in enumerate(started, 1):
        echo(f"{number}/{len(jobs)}: {run_dir}")
    echo(f"look at them: relax-hpc ls --tag {text.argument(first.name)}; then compare --tag")


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


for commands in (beginning, data, runs, boards, evaluation, talking, viewer, models):
    app.add_typer(commands)


@app.command(epilog="Example:  relax-hpc keys actor.optimizer")
def keys(
    section: Annotated[
        str, typer.Argument(help="Only keys that begin so.", autocompletion=names_of_keys)
    ] = "",
) -> None:
    """Every setting of a job with its type, its default, and what it does."""
    from relax_hpc.cli.keys import lines_of, matching

    for key in matching(section):
        echo("\n".join(lines_of(key)))


for name, group in {"bus": bus, "scale": scale, "bench": bench}.items():
    app.add_typer(group, name=name)


def _dependency(asked: str, *, local: bool) -> list[str]:
    """The setting that makes a job wait for another; empty if that has completed."""
    from relax_hpc.launch.submit import mode_of
    from relax_hpc.runs import overview

    if mode_of(local=local) == "local":
        raise ConfigError(f"--depend {asked}: only Slurm can wait for another job; leave it out")
    words = overview.on_job(asked)
    if words is None and (words := overview.on_run(run_dir_of(asked))) is None:
        _remark(f"{asked} has completed: nothing to wait for")
    return [f"resources.dependency={words}"] if words else []


def _remark(line: str) -> None:
    """Prints a remark on stderr, so that stdout can go into a file."""
    echo(line, err=True)


def _announce(submission: "Submission", *, local: bool, follow: bool) -> None:
    if submission.mode == "local" and not local:
        echo("there is no sbatch here: running on this machine")
    for component, job_id in submission.job_ids.items():
        echo(f"{component + ':':<11}{job_id}")
    echo(f"run directory: {submission.run_dir}")
    if follow:
        _follow_run(submission.run_dir)
    else:
        echo(f"next: relax-hpc status {_name(submission.run_dir)}")


def _name(run_dir: Path) -> str:
    """Returns a run's name if that is unique on the command line, else its directory."""
    try:
        found = find_run(run_dir.name)
    except ConfigError:  # several have it
        found = None
    return run_dir.name if found and found.resolve() == run_dir.resolve() else str(run_dir)


def _follow_run(run_dir: Path) -> None:
    """Shows the actor's steps as they come, then the result."""
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    with going_on(_name(run_dir)):
        for line in report.progress(run_dir):
            echo(line)
    found = run_status.collect(run_dir)
    echo(report.text(found))
    if found.state != "COMPLETED":
        raise typer.Exit(1)


def _check_folder() -> None:
    try:
        Path.cwd()  # paths of a job count from there
    except FileNotFoundError:
        raise ConfigError(
            "the folder that this is run in was removed; cd to one that is there"
        ) from None


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> None:
    """Entry point: our own errors, and files without permission, become one line and exit code
    2."""
    text.enter()
    text.print_anything()
    os.umask(permissions.UMASKS["none"])  # of what a command writes beside or into a run
    if os.environ.get("NO_COLOR"):  # rich alone would still print bold and dim
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    try:
        _check_folder()
        with use_private_folder(os.environ):
            app(prog_name="relax-hpc")
    except (RelaxError, PermissionError) as error:
        if isinstance(error, PermissionError) and error.filename is None:
            raise  # it is about no file
        said = str(error) if isinstance(error, RelaxError) else permissions.refusal(error)
        echo_styled(said, "red", err=True)
        sys.exit(2)
    except Exception:  # noqa: BLE001 - a mistake of ours, in words that may be of others
        import traceback

        echo(traceback.format_exc().rstrip(), err=True)
        sys.exit(1)
