"""`relax-hpc bench`: measures parts of relax-hpc on this machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc.cli.arguments import Overrides
from relax_hpc.cli.lines import PlainGroup, echo
from relax_hpc.runtime.files.scratch import use_private_folder

if TYPE_CHECKING:
    from rich.console import Console

bench = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="Measure parts of relax-hpc on this machine."
)


def _console() -> "Console":
    from rich.console import Console

    return Console(soft_wrap=True)


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses an unwritable file before measuring."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder; make it")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", callback=_in_a_folder, help="Also write the rows to this file."),
]
Shape = Annotated[str, typer.Option(help="A name, or a model's folder.")]
EngineKind = Annotated[str, typer.Option("--engine", help="sglang or embedded.")]
Python = Annotated[str | None, typer.Option(help="Interpreter that has the engine.")]
DataParallel = Annotated[
    int, typer.Option("--dp", help="Data-parallel ranks of the trainer.", min=1)
]
TensorParallel = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.", min=1)]
PipelineStages = Annotated[int, typer.Option("--pp", help="Pipeline stages.", min=1)]
ExpertParallel = Annotated[int, typer.Option("--ep", help="Ranks that share the experts.", min=1)]

Results = Annotated[Path, typer.Option(help="Results; what is done there is not done again.")]


@bench.callback()
def measure(context: typer.Context) -> None:
    """Measure parts of relax-hpc on this machine."""
    context.with_resource(use_private_folder(os.environ))  # as a task has it


@bench.command("bus", epilog="Example:  relax-hpc bench bus --folder /scratch --json bus.json")
def bench_bus(
    folder: Annotated[Path | None, typer.Option(help="File system to measure.")] = None,
    repeats: Annotated[int, typer.Option(min=3)] = 9,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(callback=_in_a_folder, help="Also draw the ratios to this PNG.")
    ] = None,
) -> None:
    """The bus against raw reads and writes of the same bytes."""
    from relax_hpc.cli.bench import bus, report

    before = report.machine()
    rows = list(bus.measure(folder, repeats))
    report.show(rows, _console(), json_file, before)
    if plot is not None:
        report.plot(rows, plot, before)


@bench.command(
    "train",
    epilog="Example:  relax-hpc bench train --shape qwen3-4b --tokens 16384 --documents mix --dp 2",
)
def bench_train(
    shape: Shape = "qwen3-4b",
    tokens: Annotated[list[int], typer.Option(help="Per micro-batch; repeatable.")] = [16384],  # noqa: B006
    documents: Annotated[
        list[str], typer.Option(help="one: a single one; mix: a long tail of them; repeatable.")
    ] = ["one"],  # noqa: B006
    dp: DataParallel = 1,
    tp: TensorParallel = 1,
    pp: PipelineStages = 1,
    vpp: Annotated[int, typer.Option(help="Chunks of layers per stage.", min=1)] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.", min=1)] = 1,
    ep: ExpertParallel = 1,
    etp: Annotated[int, typer.Option(help="Ranks that share an expert.", min=1)] = 1,
    recompute: Annotated[str, typer.Option(help="none, mlp or full.")] = "none",
    micro_batches: Annotated[int, typer.Option(help="Per step and replica.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed ones, after two that are not.", min=1)] = 5,
    overrides: Overrides = [],  # noqa: B006
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None, typer.Option(callback=_in_a_folder, help="Append the profiler's table here.")
    ] = None,
) -> None:
    """Train a model with random weights on this machine's GPUs: tokens/s, MFU, memory, phases."""
    from relax_hpc.cli.bench import train
    from relax_hpc.cli.bench.shapes import grid_of

    works = train.works(tokens, documents, recompute, micro_batches)
    grid = grid_of(dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)
    figures = train.measure(shape, works, grid, steps=steps, overrides=overrides, profile=profile)
    echo(train.show(figures, json_file))


@bench.command(
    "sync",
    epilog="Example:  relax-hpc bench sync --shape qwen3-4b --engines 1 --in-flight 64",
)
def bench_sync(
    shape: Shape = "qwen3-4b",
    engine: EngineKind = "sglang",
    engines: Annotated[int, typer.Option(help="Engines.", min=1)] = 1,
    engine_tp: Annotated[int, typer.Option(help="GPUs of an engine.", min=1)] = 1,
    dp: DataParallel = 1,
    tp: TensorParallel = 1,
    pp: PipelineStages = 1,
    ep: ExpertParallel = 1,
    updates: Annotated[int, typer.Option(help="Versions after version 0.", min=1)] = 10,
    in_flight: Annotated[int, typer.Option(help="Requests per engine.", min=1)] = 64,
    logprobs: Annotated[bool, typer.Option(help="Compare engine and trainer, too.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0)] = 1.0,
    undisturbed: Annotated[
        bool, typer.Option(help="Compare tokens/s with as long without updates.")
    ] = False,
    colocated: Annotated[bool, typer.Option(help="On the same GPUs, in turn.")] = False,
    overrides: Overrides = [],  # noqa: B006
    json_file: JsonFile = None,
    python: Python = None,
) -> None:
    """Update engines that are sampling: how long they stand still, by part, and GB/s."""
    from relax_hpc.cli.bench import sync
    from relax_hpc.cli.bench.shapes import grid_of

    grid = grid_of(dp=dp, tp=tp, pp=pp, ep=ep)
    figures = sync.measure(
        shape, grid, kind=engine, engines=engines, engine_tp=engine_tp,
        updates=updates, in_flight=in_flight, compare_logprobs=logprobs, every_s=every,
        compare_load=undisturbed, overrides=overrides, colocated=colocated, python=python,
    )  # fmt: skip
    echo(sync.show(figures, json_file))


@bench.command(
    "generate",
    epilog="Example:  relax-hpc bench generate --shape qwen3-4b --in-flight 1024",
)
def bench_generate(
    shape: Shape = "qwen3-4b",
    engine: EngineKind = "sglang",
    in_flight: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 1024,
    requests: Annotated[int, typer.Option(help="Requests of a trial.", min=1)] = 4096,
    siblings: Annotated[int, typer.Option(help="Requests that share a prompt.", min=1)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of every prompt.", min=1)] = 256,
    new_tokens: Annotated[int, typer.Option(help="Mean tokens of a response.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Rounds of turns.", min=1)] = 3,
    streamed: Annotated[bool, typer.Option(help="Ask token by token, too.")] = True,
    overrides: Overrides = [],  # noqa: B006
    json_file: JsonFile = None,
    python: Python = None,
) -> None:
    """Tokens per second of our client and of plain requests, on the same engine, in turns."""
    from relax_hpc.cli.bench import generate
    from relax_hpc.cli.bench.report import machine, show

    before = machine()
    load = generate.TrialLoad(in_flight, requests, siblings, prompt_tokens, new_tokens)
    turns = generate.measure(
        shape, kind=engine, load=load, repeats=repeats, streamed=streamed, overrides=overrides,
        python=python,
    )  # fmt: skip
    show(generate.rows(turns, load), _console(), json_file, before)


@bench.command(
    "modes",
    epilog="Example:  relax-hpc bench modes qwen3-4b.toml --mean 768 --p99 4096 --plot m.png",
)
def bench_modes(
    job: Annotated[Path, typer.Argument(help="A job with separate GPUs for engines and trainer.")],
    mode: Annotated[
        list[str], typer.Option(help="colocate or staleness-N; repeatable; N up to 2 unless given.")
    ] = [],  # noqa: B006
    mean: Annotated[float, typer.Option(help="Tokens of a response.", min=1)] = 3072.0,
    p99: Annotated[
        int, typer.Option(help="Their 99th percentile, at which they are cut.", min=2)
    ] = 16384,
    warm_up: Annotated[int, typer.Option(help="Steps that are not measured.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps that are measured.", min=1)] = 6,
    folder: Results = Path("runs/bench-modes"),
    limit: Annotated[float, typer.Option(help="Minutes of a mode.", min=0.1)] = 30.0,
    overrides: Overrides = [],  # noqa: B006
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=_in_a_folder, help="Also draw the timelines to this PNG."),
    ] = None,
) -> None:
    """The same job colocated and at several lags, on this machine: steps, and who waits for what.

    Lengths of responses are drawn from a distribution with a long tail, the same in each mode.
    """
    from relax_hpc.cli.bench import modes
    from relax_hpc.cli.bench.long_tail import LengthDistribution
    from relax_hpc.cli.bench.report import machine

    before, work = machine(), modes.ModeWork(LengthDistribution(mean, p99), warm_up, steps)
    results = modes.measure(
        modes.modes_of(mode), work, job, folder, overrides=overrides, limit_s=60 * limit,
        say=lambda text: echo(text, err=True),
    )  # fmt: skip
    echo(modes.markdown(results))
    if json_file is not None:
        modes.save(json_file, results, work, before)
    if plot is not None and not all(each.failure for each in results):
        modes.plot(results, work, folder, plot)
    if any(each.failure for each in results):
        raise typer.Exit(1)
