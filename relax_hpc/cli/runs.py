"""Commands that look at a run, or end it."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.cli.arguments import AsJson, Ended, Local, Overrides, Run, going_on, run_dir_of

runs = typer.Typer()


@runs.command("ls", epilog="Examples:  relax-hpc ls  |  relax-hpc ls --json | jq '.[].state'")
def list_runs(
    last: Annotated[int, typer.Option("-n", "--last", min=1, help="So many, the newest.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List my runs: state, step, reward, age."""
    from relax_hpc.launch import known_runs
    from relax_hpc.runs import overview

    found = known_runs.everywhere()
    rows = overview.collect(found, last=last)
    if as_json:
        typer.echo(overview.to_json(rows))
    elif rows:
        typer.echo(overview.text(rows))
    else:
        typer.echo("no runs yet; start one: relax-hpc submit JOB")
    if len(found) > last and not as_json:
        typer.echo(f"and up to {len(found) - last} older ones: relax-hpc ls -n {len(found)}")


@runs.command(epilog="Example:  relax-hpc status arithmetic --json | jq .progress.trajectories")
def status(run: Run, as_json: AsJson = False) -> None:
    """Tell what a run is doing, and what it has done."""
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    found = run_status.collect(run_dir_of(run))
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(report.text(found))


@runs.command(epilog="Example:  relax-hpc watch arithmetic")
def watch(run: Run) -> None:
    """Show a run on a screen that follows it: roles, queue, curve, engines, time to go.

    Until it is over, or Ctrl-C; the run goes on. Not on a terminal: once.
    """
    from rich.console import Console

    from relax_hpc.runs import screen

    run_dir = run_dir_of(run)
    with going_on(run):
        screen.watch(run_dir, Console(highlight=False))


@runs.command(
    epilog="Examples:  relax-hpc logs arithmetic -n 50  |  "
    "relax-hpc logs arithmetic --component actor --follow",
)
def logs(
    run: Run,
    component: Annotated[
        str | None,
        typer.Option(
            "--component", "--role", help="Only of this one; job: the script.", show_default=False
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("-n", "--last", min=0, help="So many lines, the newest.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the run goes on, until Ctrl-C.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="As written, with the warnings of libraries.")
    ] = False,
) -> None:
    """Print the logs of a run in order of time, each line with the task it comes from.

    A terminal shows a step in one line; elsewhere lines are as they were written. What would
    act on a terminal, as colours do, is shown by a picture of it.
    """
    from relax_hpc.printable import printable
    from relax_hpc.runs import log_text
    from relax_hpc.runs import logs as run_logs
    from relax_hpc.runs.watching import Watch

    run_dir = run_dir_of(run)
    lines = (
        run_logs.follow(run_dir, component, until=Watch(run_dir).is_over, last=last)
        if follow
        else run_logs.lines(run_dir, component, last=last)
    )
    ours = log_text.Filter()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not everything else None
    with going_on(run):
        for line in lines if everything else ours(lines):
            raw = f"{line.source}: {line.text}"
            typer.echo(printable(raw if width is None else log_text.short(line, width)))
    if ours.left_out:
        typer.echo(f"left out: warnings of libraries, {ours.left_out}; --all shows them", err=True)


@runs.command(epilog="Example:  relax-hpc timeline arithmetic --steps 10:20 --out timeline.png")
def timeline(
    run: Run,
    steps: Annotated[str, typer.Option(help="FIRST:LAST; either may be left out.")] = ":",
    out: Annotated[
        Path | None, typer.Option(help="The picture; timeline.png in the run if not given.")
    ] = None,
    start: Annotated[
        bool, typer.Option(help="Tell of the start, too, if the first of these steps follows one.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Tell where the time of a run goes: a table, and a picture of who worked and who waited."""
    import json

    from relax_hpc.paths import RunPaths
    from relax_hpc.telemetry import picture as pictures
    from relax_hpc.telemetry import timeline as timelines
    from relax_hpc.telemetry import timeline_plot

    run_dir = run_dir_of(run)
    first, last = timelines.parse_steps(steps)
    pictures.check(out or RunPaths(run_dir).timeline)
    found = timelines.read(run_dir, first=first, last=last)
    found = found if start else found._replace(start=None)
    numbers = timelines.summary(found)
    typer.echo(
        json.dumps(numbers.to_json(), allow_nan=False) if as_json else timelines.text(numbers)
    )
    picture = timeline_plot.plot([found], out or RunPaths(run_dir).timeline)
    typer.echo(f"picture: {picture}", err=as_json)


@runs.command(
    epilog="Example:  relax-hpc replay arithmetic --step 21 --set actor.layout.data_parallel=2"
)
def replay(
    run: Run,
    step: Annotated[int, typer.Option(help="A step that it has trained.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006
    local: Local = False,
    ended: Ended = False,
    as_json: AsJson = False,
) -> None:
    """Train a step of a run again from its shards, without engines; compare loss and gradient.

    --set changes the actor's grid and resources. Exit code 1 if the step is not what it was.
    """
    from relax_hpc.runs import replay as run_replay

    found = run_replay.replay(
        run_dir_of(run), step, overrides=overrides, local=local, ended=ended,
        say=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
    typer.echo(found.to_json() if as_json else run_replay.text(found))
    if not found.is_equal:
        raise typer.Exit(1)


@runs.command(epilog="Example:  relax-hpc cancel arithmetic")
def cancel(run: Run) -> None:
    """End every job that a run started, and nothing else; say what each was doing."""
    from relax_hpc.boards import finish
    from relax_hpc.paths import RunPaths
    from relax_hpc.printable import argument
    from relax_hpc.runs import cancel as run_cancel
    from relax_hpc.runs import overview

    run_dir = run_dir_of(run)
    run_cancel.cancel(run_dir, typer.echo)
    finish.complete_if_over(run_dir)
    paths = RunPaths(run_dir)
    done = f"{overview.newest_step(paths).get('step', 0)} of {overview.num_steps_of(paths)}"
    typer.echo(f"steps done: {done}; relax-hpc status {argument(run)} says more")
