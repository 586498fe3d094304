"""Verbs only. A command parses, calls one function and prints; heavy imports stay inside."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from relax_hpc import job_file, permissions
from relax_hpc.cli.bus import Ended, Run, bus, run_dir_of
from relax_hpc.cli.keys import explained, keys
from relax_hpc.cli.scale import scale
from relax_hpc.errors import RelaxError

if TYPE_CHECKING:
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
app.add_typer(bus, name="bus")
app.add_typer(scale, name="scale")
app.command(epilog="Example:  relax-hpc keys actor.optimizer")(keys)
console = Console(soft_wrap=True)

Job = Annotated[Path, typer.Argument(help="A job file, see jobs/.", show_default=False)]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value; repeatable.", show_default=False)
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")]


@app.command(
    epilog="Example:  relax-hpc check jobs/arithmetic.toml --set algorithm.max_staleness=3"
)
def check(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    local: Annotated[bool, typer.Option(help="Do not ask Slurm, even if it is here.")] = False,
    explain: Annotated[
        str | None, typer.Option(help="Only say what this key does, and its value here.")
    ] = None,
) -> None:
    """Validate a job, the files it names and the cluster; print it with every default filled in."""
    from relax_hpc.launch import preflight
    from relax_hpc.launch.submit import resolve

    if explain is not None:
        typer.echo("\n".join(explained(job_file.load(job, overrides), explain)))
        return
    config, components = resolve(job_file.load(job, overrides))
    use_slurm = not local and shutil.which("sbatch") is not None
    config = preflight.check(config, components, use_slurm=use_slurm, say=_remark)
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

    submission = submit_job(
        job_file.load(job, overrides), local=local, dry_run=dry_run, say=_remark
    )
    if dry_run:
        typer.echo(submission.script)
        return
    _announce(submission, local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc resume arithmetic")
def resume(
    run: Run,
    local: Annotated[bool, typer.Option(help="Run on this machine even if Slurm is here.")] = False,
    follow: Annotated[bool, typer.Option(help="Show the steps until the run ends.")] = False,
    ended: Ended = False,
) -> None:
    """Start a run again that was cancelled or gave up; it goes on from its newest checkpoint."""
    from relax_hpc.runs.resume import resume as resume_job

    resumed = resume_job(run_dir_of(run), local=local, ended=ended)
    _announce(resumed, local=local, follow=follow)


@app.command(epilog="Example:  relax-hpc status arithmetic --json | jq .trajectories")
def status(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """What a run is doing, and what it has done."""
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    found = run_status.collect(run_dir_of(run))
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
    from relax_hpc.runs import logs as run_logs
    from relax_hpc.runs.report import is_over

    run_dir = run_dir_of(run)
    lines = (
        run_logs.follow(run_dir, role, until=lambda: is_over(run_dir))
        if follow
        else run_logs.lines(run_dir, role)
    )
    for line in lines:
        typer.echo(f"{line.source}: {line.text}")


@app.command(epilog="Example:  relax-hpc timeline arithmetic --steps 10:20 --out timeline.png")
def timeline(
    run: Run,
    steps: Annotated[str, typer.Option(help="FIRST:LAST; either may be left out.")] = ":",
    out: Annotated[
        Path | None, typer.Option(help="The picture; timeline.png in the run if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Where the time of a run goes: a table, and a picture of who worked and who waited."""
    import json

    from relax_hpc.paths import RunPaths
    from relax_hpc.telemetry import picture as pictures
    from relax_hpc.telemetry import timeline as timelines
    from relax_hpc.telemetry import timeline_plot

    run_dir = run_dir_of(run)
    first, last = timelines.parse_steps(steps)
    pictures.check(out or RunPaths(run_dir).timeline)
    found = timelines.read(run_dir, first=first, last=last)
    numbers = timelines.summary(found)
    typer.echo(
        json.dumps(numbers._asdict(), allow_nan=False) if as_json else timelines.text(numbers)
    )
    picture = timeline_plot.plot(found, out or RunPaths(run_dir).timeline)
    typer.echo(f"picture: {picture}", err=as_json)


@app.command(epilog="Example:  relax-hpc cancel arithmetic")
def cancel(run: Run) -> None:
    """End every job that a run started, and nothing else; say what each was doing."""
    from relax_hpc.runs import cancel as run_cancel

    run_dir = run_dir_of(run)
    run_cancel.cancel(run_dir, typer.echo)
    typer.echo(f"what it has done: relax-hpc status {run_dir}")


@app.command("make-tiny", epilog="Example:  relax-hpc make-tiny models/tiny --digits 2")
def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Gets model/ and the prompts.")],
    digits: Annotated[int, typer.Option(help="Of each summand.", min=1, max=6)] = 2,
    seed: int = 0,
    target: Annotated[float, typer.Option(help="Held-out accuracy to start RL from.")] = 0.45,
) -> None:
    """Make a tiny policy and an addition task to try everything with: offline, in a minute."""
    import torch

    from relax_hpc.demo.make_tiny import make

    torch.set_num_threads(1)  # the model is too small to share out
    made = make(folder, digits=digits, seed=seed, target=target, progress=typer.echo)
    typer.echo(f"{folder}: {made}")


@app.command(
    epilog="Examples:  relax-hpc convert arithmetic --to hf --step 40  |  "
    "relax-hpc convert models/qwen3 --to megatron --out weights/qwen3"
)
def convert(
    what: Annotated[str, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.")],
    to: Annotated[str, typer.Option(help="hf or megatron.")],
    out: Annotated[Path | None, typer.Option(help="Is made; by default in the run, hf/.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run; the newest if not given.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Lends config.json and tokenizer; the run's by default.")
    ] = None,
) -> None:
    """Convert weights between checkpoints and Hugging Face folders, a tensor at a time, no GPU."""
    from relax_hpc.engines import optional_packages

    optional_packages.hush()
    from relax_hpc.checkpoints import convert as conversion

    folder = Path(what)
    if not folder.exists():
        folder = run_dir_of(what)
    typer.echo(conversion.convert(folder, to, out=out, step=step, model=model))


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
    grid = train.grid_of(dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)
    figures = train.measure(shape, works, grid, steps=steps, overrides=overrides, profile=profile)
    typer.echo(train.show(figures, json_file))


@bench.command(
    "sync",
    epilog="Example:  relax-hpc bench sync --shape qwen3-4b --engines 1 --in-flight 64",
)
def bench_sync(
    shape: Annotated[str, typer.Option(help="A name, or a model's folder.")] = "qwen3-4b",
    engine: Annotated[str, typer.Option(help="sglang or embedded.")] = "sglang",
    engines: Annotated[int, typer.Option(help="Engines.", min=1)] = 1,
    engine_tp: Annotated[int, typer.Option(help="GPUs of an engine.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks of the trainer.", min=1)] = 1,
    tp: Annotated[int, typer.Option(help="Its tensor-parallel ranks.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Its pipeline stages.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Its ranks that share the experts.", min=1)] = 1,
    updates: Annotated[int, typer.Option(help="Versions after version 0.", min=1)] = 10,
    in_flight: Annotated[int, typer.Option(help="Requests per engine.", min=1)] = 64,
    logprobs: Annotated[bool, typer.Option(help="Compare engine and trainer, too.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0)] = 1.0,
    undisturbed: Annotated[
        bool, typer.Option(help="Compare tokens/s with as long without updates.")
    ] = False,
    colocated: Annotated[bool, typer.Option(help="On the same GPUs, in turn.")] = False,
    overrides: Annotated[list[str], typer.Option("--set", help="section.key=value of a job.")] = [],  # noqa: B006
    json_file: JsonFile = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has the engine.")] = None,
) -> None:
    """Update engines that are sampling: how long they stand still, by part, and GB/s."""
    from relax_hpc.bench import sync, sync_figures
    from relax_hpc.bench.train import grid_of

    grid = grid_of(dp=dp, tp=tp, pp=pp, ep=ep)
    figures = sync.measure(
        shape, grid, kind=engine, engines=engines, engine_tp=engine_tp,
        updates=updates, in_flight=in_flight, compare_logprobs=logprobs, every_s=every,
        compare_load=undisturbed, overrides=overrides, colocated=colocated, python=python,
    )  # fmt: skip
    typer.echo(sync_figures.show(figures, json_file))


@bench.command(
    "generate",
    epilog="Example:  relax-hpc bench generate --shape qwen3-4b --in-flight 1024",
)
def bench_generate(
    shape: Annotated[str, typer.Option(help="A name, or a model's folder.")] = "qwen3-4b",
    engine: Annotated[str, typer.Option(help="sglang or embedded.")] = "sglang",
    in_flight: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 1024,
    requests: Annotated[int, typer.Option(help="Requests of a turn.", min=1)] = 4096,
    siblings: Annotated[int, typer.Option(help="Requests that share a prompt.", min=1)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Of every prompt.", min=1)] = 256,
    new_tokens: Annotated[int, typer.Option(help="Of a response, on average.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Rounds of turns.", min=1)] = 3,
    streamed: Annotated[bool, typer.Option(help="Ask token by token, too.")] = True,
    overrides: Annotated[list[str], typer.Option("--set", help="section.key=value of a job.")] = [],  # noqa: B006
    json_file: JsonFile = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has the engine.")] = None,
) -> None:
    """Tokens per second of our client and of plain requests, on the same engine, in turns."""
    from relax_hpc.bench import generate
    from relax_hpc.bench.report import machine, show

    before = machine()
    load = generate.Load(in_flight, requests, siblings, prompt_tokens, new_tokens)
    turns = generate.measure(
        shape, kind=engine, load=load, repeats=repeats, streamed=streamed, overrides=overrides,
        python=python,
    )  # fmt: skip
    show(generate.rows(turns, load), console, json_file, before)


def _remark(line: str) -> None:
    """Says something that is not what was asked for, so that this can go into a file."""
    typer.echo(line, err=True)


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
    from relax_hpc.runs import report
    from relax_hpc.runs import status as run_status

    for line in report.progress(run_dir):
        typer.echo(line)
    found = run_status.collect(run_dir)
    typer.echo(report.text(found))
    if found.state != "COMPLETED":
        raise typer.Exit(1)


def main() -> None:
    """Entry point: what we raise on purpose becomes one line and exit code 2."""
    os.umask(permissions.UMASKS["none"])  # of what a command writes beside or into a run
    try:
        app()
    except RelaxError as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
        sys.exit(2)
