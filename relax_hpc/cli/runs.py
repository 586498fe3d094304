"""Commands that show, draw, export, scale or end a run, and show its prompts and responses."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc.cli import completion
from relax_hpc.cli.arguments import (
    AsJson,
    Ended,
    Local,
    Overrides,
    Run,
    going_on,
    own_run_dir_of,
    run_dir_of,
)
from relax_hpc.cli.lines import PlainGroup, echo
from relax_hpc.errors import ConfigError
from relax_hpc.runs.viewer import By, GroupQuery, Sort
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import Service
from relax_hpc.runtime.text import argument

if TYPE_CHECKING:
    from relax_hpc.runs.scale.requests import ScaleResponse

runs = typer.Typer()

Tag = Annotated[str | None, typer.Option(help="Only runs with this tag, such as a sweep's name.")]


@runs.command("ls", epilog="Examples:  relax-hpc ls  |  relax-hpc ls --json | jq '.[].state'")
def list_runs(
    last: Annotated[
        int, typer.Option("-n", "--last", min=1, help="Show only this many, the newest.")
    ] = 20,
    tag: Tag = None,
    as_json: AsJson = False,
) -> None:
    """List my runs: state, step, reward, age."""
    from relax_hpc.launch import known_runs
    from relax_hpc.runs import overview

    found = known_runs.everywhere()
    rows = overview.collect(found, last=last, tag=tag)
    if as_json:
        echo(overview.to_json(rows))
    elif rows:
        echo(overview.text(rows))
    elif tag is None:
        echo("no runs yet; start one: relax-hpc submit JOB")
    else:
        echo(f"no run has the tag {tag}; give it one: relax-hpc tag RUN {tag}")
    if len(found) > last and tag is None and not as_json:
        echo(f"and up to {len(found) - last} older ones: relax-hpc ls -n {len(found)}")


@runs.command(epilog="Examples:  relax-hpc tag sort paper  |  relax-hpc ls --tag paper")
def tag(
    run: Run,
    tags: Annotated[list[str], typer.Argument(metavar="WORD...", help="Given to it.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take them away instead.")] = False,
) -> None:
    """Give a run words by which `ls --tag` and `compare --tag` find it."""
    from relax_hpc.runs import overview

    run_dir = own_run_dir_of(run)
    had = {*overview.tags_of(run_dir)}
    overview.set_tags(run_dir, sorted(had - {*tags} if remove else had | {*tags}))
    echo(f"{run_dir.name}: {', '.join(overview.tags_of(run_dir)) or 'no tags'}")


@runs.command("rm", epilog="Example:  relax-hpc rm sort sort-2")
def remove_runs(
    asked: Annotated[
        list[str], typer.Argument(metavar="RUN...", autocompletion=completion.names_of_runs)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs that are over: trajectories, checkpoints, logs, all of it; asks before."""
    from relax_hpc.runs import overview
    from relax_hpc.runtime.text import format_size

    run_dirs = [own_run_dir_of(each) for each in asked]
    sizes = [overview.size_of(each) for each in run_dirs]
    for run_dir, size in zip(run_dirs, sizes, strict=True):
        echo(f"{format_size(size):>10}  {run_dir}")
    if not yes and not typer.confirm(f"Delete {format_size(sum(sizes))} for good?"):
        raise typer.Exit(1)
    for run_dir in run_dirs:
        overview.remove(run_dir)


@runs.command(epilog="Example:  relax-hpc status arithmetic --json | jq .progress.trajectories")
def status(run: Run, as_json: AsJson = False) -> None:
    """Tell what a run is doing, and what it has done."""
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    found = run_status.collect(run_dir_of(run))
    if as_json:
        echo(found.to_json())
    else:
        echo(report.text(found))


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
            "--component",
            "--role",
            help="Only of this one; job: the script.",
            show_default=False,
            autocompletion=completion.names_of_components,
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("-n", "--last", min=0, help="Print only this many lines, the newest."),
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
    from relax_hpc.runs import logs as run_logs
    from relax_hpc.runs.status import Watch

    run_dir = run_dir_of(run)
    lines = (
        run_logs.follow(run_dir, component, until=Watch(run_dir).is_over, last=last)
        if follow
        else run_logs.lines(run_dir, component, last=last)
    )
    ours = run_logs.Filter()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not everything else None
    with going_on(run):
        for line in lines if everything else ours(lines):
            raw = f"{line.source}: {line.text}"
            echo(raw if width is None else run_logs.short(line, width))
    if ours.left_out:
        echo(f"left out: warnings of libraries, {ours.left_out}; --all shows them", err=True)


@runs.command(epilog="Example:  relax-hpc timeline arithmetic --steps 10:20 --out timeline.png")
def timeline(
    run: Run,
    steps: Annotated[str, typer.Option(help="FIRST:LAST; either may be left out.")] = ":",
    out: Annotated[
        Path | None,
        typer.Option(help="The picture; timeline.png in the run, if that is yours alone."),
    ] = None,
    start: Annotated[
        bool, typer.Option(help="Tell of the start, too, if the first of these steps follows one.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Tell where the time of a run goes: a table, and a picture of who worked and who waited."""
    import json
    from functools import partial

    from relax_hpc.runtime.telemetry import picture as pictures
    from relax_hpc.runtime.telemetry import timeline as timelines

    run_dir = run_dir_of(run)
    if out is None:
        permissions.check_change(RunPaths(run_dir), "say with --out where the picture is to be")
    first, last = timelines.parse_steps(steps)
    pictures.check(out or RunPaths(run_dir).timeline)
    found = timelines.read(run_dir, first=first, last=last)
    found = found if start else found._replace(start=None)
    numbers = timelines.summary(found)
    echo(json.dumps(numbers.to_json(), allow_nan=False) if as_json else timelines.text(numbers))
    save = partial(pictures.save_as_named, in_run=out is None)
    picture = timelines.plot([found], out or RunPaths(run_dir).timeline, save)
    echo(f"picture: {picture}", err=as_json)


@runs.command(
    epilog="Examples:  relax-hpc compare sort sort-2 --score 0.8  |  "
    "relax-hpc compare runs/lr-* verl.csv --out curves.png --csv curves.csv"
)
def compare(
    asked: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Runs, by name or directory, and tables in CSV, such as --csv writes.",
            autocompletion=completion.names_of_runs,
        ),
    ] = [],  # noqa: B006
    tag: Tag = None,
    heldout: Annotated[
        str | None, typer.Option(help="The held-out set; the job's first by default.")
    ] = None,
    score: Annotated[
        float | None, typer.Option(help="Also tell when each got there.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("compare.png"),
    table: Annotated[
        Path | None, typer.Option("--csv", help="Write every held-out score there, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, held-out curves with a band over seeds, what it cost.

    Runs that differ in nothing but name and seed are one group.
    """
    from relax_hpc.launch import known_runs
    from relax_hpc.runs import compare as comparison
    from relax_hpc.runs import overview
    from relax_hpc.runtime.files.user_files import write_named
    from relax_hpc.runtime.telemetry import picture as pictures

    pictures.check(out)
    named = [Path(each) if each.endswith(".csv") else run_dir_of(each) for each in asked]
    if tag is not None:
        tagged = (run for run in known_runs.everywhere() if tag in overview.tags_of(run))
        named += sorted(tagged, key=lambda run: run.name)
    named = list({each.resolve(): each for each in named}.values())
    if not named:
        raise ConfigError("compare: lacks RUN; name runs, or --tag those that have one")
    found = comparison.collect(named, heldout=heldout)
    echo(comparison.to_json(found) if as_json else comparison.text(found, score=score))
    if table is not None:
        with write_named(table, "--csv", replace=True) as file:
            file.write(comparison.to_csv(found).encode())
    picture = pictures.save_as_named(comparison.plot(found), out, in_run=False)
    echo(f"picture: {picture}", err=as_json)


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
        say=lambda line: echo(line, err=True),
    )  # fmt: skip
    echo(found.to_json() if as_json else run_replay.text(found))
    if not found.is_equal:
        raise typer.Exit(1)


@runs.command(
    epilog="Examples:  relax-hpc cancel arithmetic  |  relax-hpc cancel arithmetic --save"
)
def cancel(
    run: Run,
    save: Annotated[
        bool, typer.Option("--save", help="Save before, as soon as the step under way is done.")
    ] = False,
    within: Annotated[
        float, typer.Option(min=0, help="Seconds for --save; then nothing is cancelled.")
    ] = 600.0,
) -> None:
    """End every job that a run started, and nothing else; say what each was doing.

    Exit code 1 if --save took too long: the run goes on.
    """
    from relax_hpc.runs import cancel as run_cancel
    from relax_hpc.runs import overview
    from relax_hpc.runs.boards import finish

    run_dir = own_run_dir_of(run)
    if save and not run_cancel.save(run_dir, within, echo):
        raise typer.Exit(1)
    run_cancel.cancel(run_dir, echo)
    finish.complete_if_over(run_dir)
    paths = RunPaths(run_dir)
    done = f"{overview.newest_step(paths).get('step', 0)} of {overview.num_steps_of(paths)}"
    echo(f"steps done: {done}; relax-hpc status {argument(run)} says more")


boards = typer.Typer()


@boards.command(epilog="Example:  relax-hpc report arithmetic")
def report(run: Run) -> None:
    """Write the summary, the picture of the curve and TensorBoard of a run, as far as it is."""
    from relax_hpc.runs.boards import finish

    run_dir = own_run_dir_of(run)
    is_over = finish.report(run_dir)
    paths = RunPaths(run_dir)
    echo(f"summary:     {paths.summary}")
    for picture in (paths.reward_curve, paths.loss_curve):
        if picture.exists():
            echo(f"curve:       {picture}")
    kept = "" if is_over else "   (its job keeps it up to date)"
    echo(f"tensorboard: tensorboard --logdir {argument(paths.tensorboard)}{kept}")


@boards.command(epilog="Example:  relax-hpc export wandb arithmetic --offline")
def export(
    service: Annotated[Service, typer.Argument(help="Where to.", show_default=False)],
    run: Run,
    offline: Annotated[
        bool, typer.Option("--offline", help="Write it below the run directory, send nothing.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as the run goes on; Ctrl-C leaves.")
    ] = False,
    uri: Annotated[
        str | None,
        typer.Option("--tracking-uri", help="Server of MLflow, in place of the job's."),
    ] = None,
) -> None:
    """Send the curves of a run to a service: what it does not have yet."""
    from relax_hpc.runs.boards import export as exports

    run_dir = own_run_dir_of(run)
    found = exports.send(run_dir, service, offline=offline, follow=follow, uri=uri)
    echo(f"{service}: run {found.id}, up to step {found.step}")
    for folder in sorted(run_dir.glob("wandb/offline-run-*")) if service == "wandb" else ():
        echo(f"to send it: wandb sync --append {folder}")
    if service == "mlflow" and offline:
        uri = f"sqlite:///{run_dir.absolute()}/mlflow.db"
        echo(f"to look at it: mlflow ui --backend-store-uri {uri}")


viewer = typer.Typer()

Guid = Annotated[int | None, typer.Option(help="Only this prompt group.", show_default=False)]
Step = Annotated[
    int | None, typer.Option(help="Only what this step is trained on.", show_default=False)
]
Tokens = Annotated[
    int, typer.Option(min=2, help="Most tokens shown of a text, its beginning and end.")
]
Count = Annotated[int, typer.Option("--groups", min=1, help="Prompt groups at most.")]


@viewer.command(epilog="Example:  relax-hpc view arithmetic --sort worst --groups 8")
def view(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="The page; view.html in the run, if that is yours alone.")
    ] = None,
    sort: Annotated[
        Sort,
        typer.Option(help="Which come first; flipped: prompts that went from wrong to right."),
    ] = "newest",
    groups: Count = 16,
    step: Step = None,
    guid: Guid = None,
    by: Annotated[By, typer.Option(help="Meaning of the colours of tokens.")] = "logprob",
    tokens: Tokens = 1000,
    text: Annotated[bool, typer.Option("--text", help="Print it instead.")] = False,
) -> None:
    """Write a page of trajectories: siblings side by side, every token coloured."""
    from rich.console import Console

    from relax_hpc.runs.viewer import output
    from relax_hpc.runs.viewer.run import RunViewer

    if step is not None and guid is not None:
        raise ConfigError("--step and --guid: give one of them")
    if sort == "flipped" and (step is not None or guid is not None):
        raise ConfigError("--sort flipped: compares steps; leave --step and --guid out")
    run_dir = run_dir_of(run)
    if out is None and not text:
        permissions.check_change(RunPaths(run_dir), "say with --out where the page is to be")
    sight = RunViewer(run_dir)
    found = sight.view(GroupQuery(sort, groups, step, guid), tokens)
    if text:
        output.show(Console(), found.groups, by)
    for remark in found.remarks:
        echo(remark, err=True)
    if text:
        return
    target = out or RunPaths(run_dir).view
    head = output.PageHeader(run_dir.resolve().name, by, found.remarks, sight.solved_at)
    count = output.write(target, head, found.groups, in_run=out is None)
    echo(f"{target}: {count} prompt groups")


@viewer.command(epilog="Example:  relax-hpc peek arithmetic --follow --groups 1")
def peek(
    run: Run,
    groups: Count = 3,
    tokens: Tokens = 200,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Go on as the run goes on; Ctrl-C leaves, and the run goes on."
        ),
    ] = False,
) -> None:
    """Print the newest prompts, answers and responses with rewards, while the run goes on."""
    from rich.console import Console

    from relax_hpc.runs.status import Watch
    from relax_hpc.runs.viewer import output
    from relax_hpc.runs.viewer.run import RunViewer

    run_dir = run_dir_of(run)
    sight, is_told = RunViewer(run_dir), False
    until = Watch(run_dir).is_over if follow else (lambda: True)
    with going_on(run):
        for number, found in enumerate(sight.follow(groups, tokens, until=until)):
            shown = list(found.groups)
            output.show(Console(), shown, by=None)
            remarks = [sight.describe_unmarked(shown), *found.remarks] if number == 0 else []
            if shown and not is_told:
                remarks, is_told = [sight.missing_answers, *remarks], True
            for remark in filter(None, remarks):
                echo(remark, err=True)


scale = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="Add rollout engines to a run that is running, and remove them.",
)

_DRAIN_S = 300.0
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done; exit code 1 if not.")]


@scale.command(
    "out",
    epilog="Examples:  relax-hpc scale out arithmetic --engines 4  |  "
    "relax-hpc scale out arithmetic --engines 4 --transport files --wait",
)
def scale_out(
    run: Run,
    engines: Annotated[int, typer.Option(help="Total number of engines of the run.")],
    transport: Annotated[
        str | None,
        typer.Option(help="collective, or files without a fabric; else weights.transport."),
    ] = None,
    wait: Wait = False,
) -> None:
    """Add engines in nodes that the run holds and does not use (resources.max_nodes)."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    _tell(run_dir, scaling.out(run_dir, engines, transport), wait=wait)


@scale.command(
    "in",
    epilog="Examples:  relax-hpc scale in arithmetic --engines 2  |  "
    "relax-hpc scale in arithmetic --member extra-3 --drain 60",
)
def scale_in(
    run: Run,
    engines: Annotated[int | None, typer.Option(help="Total number of engines of the run.")] = None,
    member: Annotated[str | None, typer.Option(help="An added engine, see scale list.")] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds for its requests to end; then others go on.")
    ] = _DRAIN_S,
    wait: Wait = False,
) -> None:
    """Remove added engines, the newest first; those the run started with stay."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    asked = scaling.scale_in(run_dir, engines=engines, member=member, drain_s=drain)
    _tell(run_dir, asked, wait=wait)


@scale.command("cancel", epilog="Example:  relax-hpc scale cancel arithmetic")
def scale_cancel(run: Run, wait: Wait = False) -> None:
    """Take back a scale out that is under way; engines it has started are ended."""
    from relax_hpc.runs.scale import requests as scaling

    run_dir = own_run_dir_of(run)
    request = scaling.cancel(run_dir)
    echo(f"{request}: is taken back")
    if wait:
        outcome = scaling.wait(run_dir, request)
        echo(f"{request}: {outcome.state.lower()}")


@scale.command(
    "list", epilog="Example:  relax-hpc scale list arithmetic --json | jq '.rows[].state'"
)
def scale_list(run: Run, as_json: AsJson = False) -> None:
    """Engines of a run: state, node, version of the weights, requests they have now."""
    from relax_hpc.runs.scale import requests

    found = requests.collect(run_dir_of(run))
    echo(found.to_json() if as_json else requests.text(found))


def _tell(run_dir: Path, asked: "ScaleResponse", *, wait: bool) -> None:
    from relax_hpc.runs.scale import requests as scaling
    from relax_hpc.runtime.text import argument

    if asked.request is None:
        echo(f"nothing to do: the run has {asked.engines} engines")
        return
    echo(f"{asked.request}: {'is under way already' if asked.repeated else 'is begun'}")
    if not wait:
        echo(f"next: relax-hpc scale list {argument(run_dir)}")
        return
    outcome = scaling.wait(run_dir, asked.request)
    said = f"{asked.request}: {outcome.state.lower()}{outcome.reason and ': '}{outcome.reason}"
    echo(said)
    if outcome.state != "DONE":
        raise typer.Exit(1)
