"""Verbs only. A command parses, calls one function and prints; heavy imports stay inside."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from relax_hpc import job_file
from relax_hpc.errors import ConfigError, LaunchError, RelaxError
from relax_hpc.paths import RunPaths

if TYPE_CHECKING:
    from relax_hpc.bus.plan import PlanPosition
    from relax_hpc.bus.tools.show import Decode
    from relax_hpc.launch.submit import Submission

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous RL post-training of language models on plain Slurm.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure parts of relax-hpc on this machine.")
app.add_typer(bench, name="bench")
bus = typer.Typer(no_args_is_help=True, help="Look into the data bus of a run, and tidy it up.")
app.add_typer(bus, name="bus")
console = Console(soft_wrap=True)

Job = Annotated[Path, typer.Argument(help="A job file, see jobs/.", show_default=False)]
Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value; repeatable.", show_default=False)
]
Text = Annotated[bool, typer.Option(help="Decode tokens with the tokenizer of the model.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")]


@app.command(
    epilog="Example:  relax-hpc check jobs/arithmetic.toml --set algorithm.max_staleness=3"
)
def check(job: Job, overrides: Overrides = []) -> None:  # noqa: B006
    """Validate a job, the files it names and the cluster; print it with every default filled in."""
    from relax_hpc.launch import preflight
    from relax_hpc.launch.submit import resolve

    config, components = resolve(job_file.load(job, overrides))
    config = preflight.check(config, components, use_slurm=shutil.which("sbatch") is not None)
    typer.echo(config.model_dump_json(indent=2))


@app.command(epilog="Example:  relax-hpc submit jobs/arithmetic.toml --set name=try1 --dry-run")
def submit(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option(help="Print the batch script, submit nothing.")] = False,
    local: Annotated[bool, typer.Option(help="Run on this machine even if Slurm is here.")] = False,
    follow: Annotated[bool, typer.Option(help="Show the steps until the run ends.")] = False,
) -> None:
    """Submit every role of a job as one heterogeneous Slurm job, or run it on this machine."""
    from relax_hpc.launch.submit import submit as submit_job

    submission = submit_job(job_file.load(job, overrides), local=local, dry_run=dry_run)
    if dry_run:
        typer.echo(submission.script)
        return
    _announce(submission, local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc resume arithmetic")
def resume(
    run: Run,
    local: Annotated[bool, typer.Option(help="Run on this machine even if Slurm is here.")] = False,
    follow: Annotated[bool, typer.Option(help="Show the steps until the run ends.")] = False,
) -> None:
    """Start a run again that was cancelled or gave up; it goes on from its newest checkpoint."""
    from relax_hpc.launch.submit import resume as resume_job

    _announce(resume_job(_run_dir(run), local=local), local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc status arithmetic --json | jq .trajectories")
def status(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """What a run is doing, and what it has done."""
    from relax_hpc.launch import report
    from relax_hpc.launch import status as run_status

    found = run_status.collect(_run_dir(run))
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(report.text(found))


@app.command(epilog="Example:  relax-hpc logs arithmetic --role actor --follow")
def logs(
    run: Run,
    role: Annotated[str | None, typer.Option(help="Only this role.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option(help="Go on as the run goes on.")] = False,
) -> None:
    """Print the logs of a run, each line with the task it comes from."""
    from relax_hpc.launch import logs as run_logs
    from relax_hpc.launch.report import is_over

    run_dir = _run_dir(run)
    lines = (
        run_logs.follow(run_dir, role, until=lambda: is_over(run_dir))
        if follow
        else run_logs.lines(run_dir, role)
    )
    for line in lines:
        typer.echo(f"{line.source}: {line.text}")


@app.command(epilog="Example:  relax-hpc cancel arithmetic")
def cancel(run: Run) -> None:
    """End everything a run started, and nothing else."""
    from relax_hpc.launch import cancel as run_cancel

    run_dir = _run_dir(run)
    run_cancel.cancel(run_dir)
    typer.echo(f"cancelled; what it has done: relax-hpc status {run_dir}")


@app.command("make-tiny", epilog="Example:  relax-hpc make-tiny models/tiny --digits 2")
def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Gets model/ and the prompts.")],
    digits: Annotated[int, typer.Option(help="Of each summand.", min=1, max=6)] = 2,
    seed: int = 0,
    target: Annotated[float, typer.Option(help="Held-out accuracy to start RL from.")] = 0.45,
) -> None:
    """Make a tiny policy and an addition task to try everything with: offline, in a minute."""
    import torch

    from relax_hpc.roles.make_tiny import make

    torch.set_num_threads(1)  # the model is too small to share out
    made = make(folder, digits=digits, seed=seed, target=target, progress=typer.echo)
    typer.echo(f"{folder}: {made}")


@bench.command("bus", epilog="Example:  relax-hpc bench bus --folder /scratch --json bus.json")
def bench_bus(
    folder: Annotated[Path | None, typer.Option(help="File system to measure.")] = None,
    repeats: Annotated[int, typer.Option(min=3)] = 9,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios to this PNG.")] = None,
) -> None:
    """The bus against raw reads and writes, and against TransferQueue where it is installed."""
    from relax_hpc.bench import bus, bus_operations, bus_restart, report, transfer_queue

    before = report.machine()
    rows = [
        *bus.measure(folder, repeats),
        *bus_restart.measure(folder),
        *bus_operations.measure(),
        *transfer_queue.measure(folder, repeats),
    ]
    report.show(rows, console, json_file, before)
    if missing := transfer_queue.missing():
        typer.echo(f"not compared with TransferQueue: {missing}")
    if missing := bus_operations.missing():
        typer.echo(f"metadata operations not counted: {missing}")
    if plot is not None:
        report.plot(rows, plot, before)


@bench.command("bus-scale", epilog="Example:  relax-hpc bench bus-scale --plot scale.png")
def bench_bus_scale(
    capacity: Annotated[float, typer.Option(help="Creates per second of your server.")] = 50_000,
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture.")] = None,
) -> None:
    """Simulate the bus with up to 10,000 producers: what gives out first, and what helps."""
    from relax_hpc.bench import bus_scale
    from relax_hpc.bench.bus_simulation import Site

    site = Site(capacity=capacity)
    typer.echo(bus_scale.report(site))
    if plot is not None:
        bus_scale.plot(plot, site)


@bench.command(
    "train",
    epilog="Example:  relax-hpc bench train --shape qwen3-4b --tokens 16384 --documents mix --dp 2",
)
def bench_train(
    shape: Annotated[str, typer.Option(help="A name, or a model's folder.")] = "qwen3-4b",
    tokens: Annotated[list[int], typer.Option(help="Of a micro-batch; repeatable.")] = [16384],  # noqa: B006
    documents: Annotated[
        list[str], typer.Option(help="one: a single one; mix: a long tail of them; repeatable.")
    ] = ["one"],  # noqa: B006
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.", min=1)] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1)] = 1,
    vpp: Annotated[int, typer.Option(help="Chunks of layers per stage.", min=1)] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.", min=1)] = 1,
    etp: Annotated[int, typer.Option(help="Ranks that share an expert.", min=1)] = 1,
    recompute: Annotated[str, typer.Option(help="none, mlp or full.")] = "none",
    micro_batches: Annotated[int, typer.Option(help="Per step and replica.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed ones, after two that are not.", min=1)] = 5,
    overrides: Annotated[list[str], typer.Option("--set", help="actor.key=value.")] = [],  # noqa: B006
    json_file: JsonFile = None,
    profile: Annotated[Path | None, typer.Option(help="Append the profiler's table here.")] = None,
) -> None:
    """Train a model with random weights on this machine's GPUs: tokens/s, MFU, memory, phases."""
    from relax_hpc.bench import train

    works = train.works(tokens, documents, recompute, micro_batches)
    grid = train.Grid(dp, tp, pp, vpp, cp, ep, etp)
    figures = train.measure(shape, works, grid, steps=steps, overrides=overrides, profile=profile)
    typer.echo(train.show(figures, json_file))


@bus.command("ls", epilog="Example:  relax-hpc bus ls arithmetic --json | jq .total")
def bus_ls(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Producers, sidecar writers and the plan: what is committed, planned, and on disk."""
    from relax_hpc.bus.tools import listing

    paths = RunPaths(_run_dir(run))
    checkpoints = _positions(paths)
    found = listing.collect(paths.bus, checkpoints[-1] if checkpoints else None)
    typer.echo(found.to_json() if as_json else listing.text(found))


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
        typer.echo(show.shard(Path(what)))
        return
    paths = RunPaths(_run_dir(what))
    if (step is None) == (guid is None):
        raise ConfigError(f"{what}: is a run; give --step or --guid, or name a shard (bus/p/...)")
    if step is not None:
        typer.echo(show.step(paths.bus, step))
    elif guid is not None:
        typer.echo(show.group(paths.bus, guid, _decoder(paths) if text else None))


@bus.command("verify", epilog="Example:  relax-hpc bus verify arithmetic && echo sound")
def bus_verify(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Check every record, file and checksum, while the run goes on or afterwards.

    The exit code is 1 if anything is wrong. What a crash leaves behind is listed, but not wrong.
    """
    from rich.progress import Progress

    from relax_hpc.bus.tools import verify

    paths = RunPaths(_run_dir(run))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("verify")
        found = verify.verify(
            paths.bus,
            lambda: _positions(paths),
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
    typer.echo(found.to_json() if as_json else verify.text(found))
    if not found.is_sound:
        raise typer.Exit(1)


@bus.command("gc", epilog="Example:  relax-hpc bus gc arithmetic --dry-run")
def bus_gc(
    run: Run,
    dry_run: Annotated[bool, typer.Option(help="Say what would go, delete nothing.")] = False,
    ended: Annotated[bool, typer.Option(help="I know that it has ended; Slurm forgot it.")] = False,
) -> None:
    """Delete orphans and retired shards of a run that has ended.

    Nothing goes that a resume from any checkpoint on disk needs.
    """
    from relax_hpc.bus.tools import garbage
    from relax_hpc.launch import status as run_status

    run_dir = _run_dir(run)
    state = run_status.job_state(run_dir)
    if state in run_status.ACTIVE:
        raise LaunchError(
            f"{run_dir}: is {state}, and its components delete what they own themselves; "
            f"wait for its end, or end it: relax-hpc cancel {run}"
        )
    if state == "UNKNOWN" and not ended:
        raise LaunchError(
            f"{run_dir}: Slurm does not know its job, and the job left no exit code; if it has "
            "ended (squeue says so), add --ended"
        )
    paths = RunPaths(run_dir)
    found = garbage.find(paths.bus, _positions(paths))
    if not dry_run:
        garbage.delete(found)
    typer.echo(garbage.text(found, dry_run=dry_run))


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
    """Write trajectories as rows, sidecar columns included: all on disk, or those of some steps."""
    from rich.progress import Progress

    from relax_hpc.bus.tools import export

    paths = RunPaths(_run_dir(run))
    names = [name.strip() for name in columns.split(",")] if columns else []
    chosen = export.columns_named(names, _decoder(paths) if text else None)
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
    typer.echo(f"{to}: {count} rows")


def _positions(paths: RunPaths) -> list["PlanPosition"]:
    """Where the checkpoints of a run are in its plan, oldest first."""
    from relax_hpc.bus.plan import PlanPosition
    from relax_hpc.comm.world import SoloWorld
    from relax_hpc.roles.checkpoints import Checkpoints

    found = Checkpoints(paths.checkpoints, SoloWorld(), PlanPosition, keep=1).complete()
    return [checkpoint.position for checkpoint in found]


def _decoder(paths: RunPaths) -> "Decode":
    """Tokens to text, with the tokenizer of the run's model."""
    from relax_hpc.prompts import tokenizer

    decode = tokenizer.load(job_file.read_resolved(paths.config).model.path).decode
    return lambda tokens: str(decode(tokens))


def _run_dir(run: str) -> Path:
    for candidate in (Path(run), Path("runs") / run):
        if (candidate / "run.json").is_file():
            return candidate
    raise ConfigError(f"{run}: no such run; give a run directory, or a name under runs/")


def _announce(submission: "Submission", *, local: bool, follow: bool) -> None:
    if submission.mode == "local" and not local:
        typer.echo("there is no sbatch here: running on this machine")
    for role, job_id in submission.job_ids.items():
        typer.echo(f"{role + ':':<11}{job_id}")
    typer.echo(f"run directory: {submission.run_dir}")
    if follow:
        _follow_run(submission.run_dir)
    else:
        typer.echo(f"next: relax-hpc status {submission.run_dir}")


def _follow_run(run_dir: Path) -> None:
    """Shows the actor's steps as they come, then what the run has come to."""
    from relax_hpc.launch import report
    from relax_hpc.launch import status as run_status

    for line in report.progress(run_dir):
        typer.echo(line)
    found = run_status.collect(run_dir)
    typer.echo(report.text(found))
    if found.state != "COMPLETED":
        raise typer.Exit(1)


def main() -> None:
    """Entry point: what we raise on purpose becomes one line and exit code 2."""
    try:
        app()
    except RelaxError as error:
        typer.secho(str(error), fg="red", err=True)
        sys.exit(2)
