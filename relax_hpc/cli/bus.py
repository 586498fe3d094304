"""`relax-hpc bus`: shows, checks and exports the data bus of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc.cli.arguments import AsJson, Ended, Run, own_run_dir_of, run_dir_of
from relax_hpc.cli.lines import PlainGroup, echo
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import argument

if TYPE_CHECKING:
    from relax_hpc.bus.plan import PlanPosition
    from relax_hpc.bus.tools.show import Decode

bus = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="Look into the data bus of a run, and tidy it up."
)

Text = Annotated[bool, typer.Option(help="Decode tokens with the tokenizer of the model.")]


@bus.command("ls", epilog="Example:  relax-hpc bus ls arithmetic --json | jq .total")
def bus_ls(run: Run, as_json: AsJson = False) -> None:
    """Producers, sidecar writers and the plan: what is committed, planned, and on disk."""
    from relax_hpc.bus.tools import show

    paths = RunPaths(run_dir_of(run))
    checkpoints = _positions(paths)
    found = show.list_writers(paths.bus, checkpoints[-1] if checkpoints else None)
    echo(found.to_json() if as_json else show.listing_text(found))


@bus.command(
    "show",
    epilog="Examples:  relax-hpc bus show arithmetic --step 3  |  "
    "relax-hpc bus show arithmetic --guid 70 --text  |  relax-hpc bus show SHARD.h5",
)
def bus_show(
    what: Annotated[str, typer.Argument(help="A shard; or a run, with --step or --guid.")],
    step: Annotated[int | None, typer.Option(help="A step of the plan, from 1.")] = None,
    guid: Annotated[int | None, typer.Option(help="A prompt group, by its ordinal.")] = None,
    text: Text = False,
) -> None:
    """Show what is in a shard, what a step is trained on, or a prompt group field by field."""
    from relax_hpc.bus.tools import show

    if what.endswith(".h5") or Path(what).is_file():
        echo(show.shard(Path(what)))
        return
    paths = RunPaths(run_dir_of(what))
    if (step is None) == (guid is None):
        raise ConfigError(f"{what}: is a run; give --step or --guid, or name a shard (bus/p/...)")
    if step is not None:
        echo(show.step(paths.bus, step))
    elif guid is not None:
        echo(show.group(paths.bus, guid, _decoder(paths) if text else None))


@bus.command("verify", epilog="Example:  relax-hpc bus verify arithmetic && echo sound")
def bus_verify(run: Run, as_json: AsJson = False) -> None:
    """Check every record, file and checksum, while the run goes on or afterwards.

    The exit code is 1 if anything is wrong. What a crash leaves behind is listed, but not wrong.
    """
    from rich.console import Console
    from rich.progress import Progress

    from relax_hpc.bus.tools import verify

    paths = RunPaths(run_dir_of(run))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("verify")
        found = verify.verify(
            paths.bus,
            lambda: _positions(paths),
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
    echo(found.to_json() if as_json else verify.text(found))
    if not found.is_sound:
        raise typer.Exit(1)


@bus.command("gc", epilog="Example:  relax-hpc bus gc arithmetic --dry-run")
def bus_gc(
    run: Run,
    dry_run: Annotated[bool, typer.Option(help="Say what would go, delete nothing.")] = False,
    ended: Ended = False,
) -> None:
    """Delete orphans and retired shards of a run that has ended.

    Nothing goes that a resume from any checkpoint on disk needs.
    """
    from relax_hpc.bus.tools import garbage
    from relax_hpc.runs import status as run_status

    run_dir = own_run_dir_of(run)
    if alive := run_status.alive(run_dir, run_status.of_run(run_dir), sure=ended):
        raise LaunchError(
            f"{run_dir}: is {alive.state}, and its components delete what they own "
            f"themselves; wait for its end, or end it: relax-hpc cancel {argument(run)}"
        )
    paths = RunPaths(run_dir)
    found = garbage.find(paths.bus, _positions(paths))
    if not dry_run:
        garbage.delete(found)
    echo(garbage.text(found, dry_run=dry_run))


@bus.command(
    "export",
    epilog="Example:  relax-hpc bus export arithmetic --to step12.parquet --step 12 --text",
)
def bus_export(
    run: Run,
    to: Annotated[Path, typer.Option(help="A file that ends in .parquet or .jsonl.")],
    steps: Annotated[
        str | None, typer.Option("--step", help="B, or A:B with both: as the trainer saw them.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Names, separated by commas.")] = None,
    text: Text = False,
) -> None:
    """Write trajectories as rows with answers and sidecars: all on disk, or those of some steps."""
    from rich.console import Console
    from rich.progress import Progress

    from relax_hpc.bus.tools import export
    from relax_hpc.runs.answers import Answers

    paths = RunPaths(run_dir_of(run))
    names = [name.strip() for name in columns.split(",")] if columns else []
    answers = Answers(paths)
    chosen = export.columns_named(names, _decoder(paths) if text else None, answers.of)
    with Progress(
        "{task.completed} rows", console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task("export", total=None)
        count = export.export(
            paths.bus,
            to,
            chosen,
            export.parse_steps(steps) if steps else None,
            lambda rows: progress.update(bar, completed=rows),
        )
    echo(f"{to}: {count} rows")
    if count and answers.missing and not chosen.keys().isdisjoint(export.DATA):
        echo(answers.missing, err=True)


@bus.command("media", epilog="Example:  relax-hpc bus media colours --guid 70 --out seen")
def bus_media(
    run: Run,
    guid: Annotated[int, typer.Option(help="A prompt group, by its ordinal.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
) -> None:
    """Write the images, videos and sounds that a prompt group was shown, each checked, as files."""
    from relax_hpc.bus.tools import export

    echo(export.text(export.write(RunPaths(run_dir_of(run)).bus, guid, out)))


def _positions(paths: RunPaths) -> list["PlanPosition"]:
    from relax_hpc.bus.plan import PlanPosition
    from relax_hpc.runtime.comm.world import SoloWorld
    from relax_hpc.trainer.checkpoints.store import Checkpoints

    found = Checkpoints(paths.checkpoints, SoloWorld(), PlanPosition, keep=1).complete()
    return [checkpoint.position for checkpoint in found]


def _decoder(paths: RunPaths) -> "Decode":
    from relax_hpc.config import job_file
    from relax_hpc.data import tokenizer

    decode = tokenizer.load(job_file.read_resolved(paths.config).model.path).decode
    return lambda tokens: str(decode(tokens))
