"""Training steps of a model with random weights: tokens per second, MFU, memory, time per phase.

It is the trainer of a run, fed as the actor feeds it, without the bus. Of a shape nothing but a
config.json is written: Megatron-core draws the weights on the GPU.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from relax_hpc.bench.report import machine
from relax_hpc.bench.shapes import model_folder
from relax_hpc.bench.train_task import Figures, Task, Work, grid_name
from relax_hpc.config.layout import Layout
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import with_overrides
from relax_hpc.models.registry import read_architecture
from relax_hpc.records import write_json
from relax_hpc.run_secret import RunSecret
from relax_hpc.scratch import scratch_folder
from relax_hpc.telemetry.tables import aligned

_FORMULA = "(6 N T + 6 layers heads head_dim sum(length^2)) / (seconds x 989e12)"
_JOIN_S = 120


def works(
    tokens: Sequence[int], documents: Sequence[str], recompute: str, micro_batches: int
) -> list[Work]:
    """Every size with every kind of documents.

    Raises:
        ConfigError: no such kind, no such way to recompute.
    """
    for option, values, known in (
        ("--documents", documents, ("one", "mix")),
        ("--recompute", [recompute], ("none", "mlp", "full")),
    ):
        for value in values:
            if value not in known:
                raise ConfigError(f"{option} {value}: is none of {', '.join(known)}")
    return [
        Work(size, "one" if kind == "one" else "mix", recompute, micro_batches)
        for size in tokens
        for kind in documents
    ]


def show(figures: Sequence[Figures], json_file: Path | None) -> str:
    """A line per measurement, with the formula of MFU; if asked for, all of it as JSON."""
    heads = ("grid", "tokens", "documents", "recompute", "tokens/s", "per GPU", "MFU", "step",
             "forward", "+ backward", "update", "loss", "peak")  # fmt: skip
    lines: list[tuple[str, ...]] = [heads]
    for row in figures:
        phases = (row.step_s, row.forward_s, row.forward_backward_s, row.update_s)
        lines.append((
            row.grid, f"{row.micro_batches} x {row.tokens}", row.documents, row.recompute,
            f"{row.tokens_per_s:.0f}", f"{row.tokens_per_s_per_gpu:.0f}", f"{row.mfu:.1%}",
            *(f"{1e3 * phase:.0f} ms" for phase in phases), f"{1e3 * row.loss_s:.2f} ms",
            f"{row.peak_gib:.1f} GiB",
        ))  # fmt: skip
    table = aligned(lines)
    if json_file is not None:
        rows = [asdict(row) for row in figures]
        write_json(json_file, {"machine": machine(), "mfu": _FORMULA, "rows": rows})
    return "\n".join([f"{machine()}; MFU = {_FORMULA}", *table])


def measure(
    shape: str,
    works: Sequence[Work],
    grid: Mapping[str, int],
    *,
    steps: int = 5,
    overrides: Sequence[str] = (),
    profile: Path | None = None,
) -> list[Figures]:
    """Measures every `Work` on as many GPUs as the grid has ranks; on CPUs without any.

    Args:
        shape: a name of `SHAPES`, or a folder with a config.json; its weights are used, if any.
        grid: keys of `Layout`; what is missing is 1.
        overrides: `section.key=value` of the job, for example "actor.attention=varlen".
        profile: gets the table of the profiler for one step of every work, by rank 0.

    Raises:
        ConfigError: no such shape; no such grid, or more ranks than GPUs; micro-batches that do not
            fit the grid.
    """
    import torch

    with scratch_folder("bench") as folder:
        task = task_of(
            shape, works, grid, folder, steps=steps, overrides=overrides, profile=profile
        )
        layout, gpus = task.config.actor.layout, torch.cuda.device_count()
        if gpus and layout.world_size > gpus:
            raise ConfigError(
                f"{grid_name(layout)}: {layout.world_size} ranks, but {gpus} GPUs are here; "
                "use fewer"
            )
        return _on_ranks(task)


def task_of(
    shape: str,
    works: Sequence[Work],
    grid: Mapping[str, int],
    folder: Path,
    *,
    steps: int = 5,
    overrides: Sequence[str] = (),
    profile: Path | None = None,
) -> Task:
    """Makes the orders to the ranks; see `measure`.

    Args:
        folder: an empty one, for what they share.
    """
    model = model_folder(shape, folder)
    config = with_overrides(_tree(model, grid), overrides, source="bench train")
    for work in works:
        _check_micro_batches(work, config.actor.layout)
    architecture = read_architecture(model)
    return Task(folder, shape, architecture, tuple(works), config, steps, tuple(overrides), profile)


def _tree(model: Path, grid: Mapping[str, int]) -> dict[str, Any]:
    """A job."""
    import torch

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return {
        "name": "bench",
        "model": {"path": str(model), "dtype": dtype},
        "prompts": {"train": "unused"},
        "actor": {"layout": dict(grid)},
        "schedule": {"num_steps": 1000},
    }


def _check_micro_batches(work: Work, layout: Layout) -> None:
    if rest := work.micro_batches % layout.micro_batches_multiple_of:
        raise ConfigError(
            f"--micro-batches {work.micro_batches}: {grid_name(layout)} interleaves chunks of "
            f"layers, which takes a multiple of {layout.micro_batches_multiple_of}; "
            f"use {work.micro_batches - rest + layout.micro_batches_multiple_of}"
        )


def _on_ranks(task: Task) -> list[Figures]:
    # Megatron's tensor parallelism overlaps only if kernels start in the order they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    RunSecret.create(task.secret)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_on_rank, args=(rank, task), daemon=False)
        for rank in range(task.config.actor.layout.world_size)
    ]
    run_to_end(ranks)
    if not task.results.exists():
        raise ConfigError("a rank failed; its error is above")
    return [Figures(**figures) for figures in json.loads(task.results.read_text())]


def _on_rank(rank: int, task: Task) -> None:
    """Imports Megatron-core as a task of a run does, and only here."""
    from relax_hpc.engines.megatron import cpu

    cpu.install()
    from relax_hpc.bench import train_rank

    train_rank.run(rank, task)


def run_to_end(ranks: Sequence[SpawnProcess]) -> None:
    """Starts processes and waits for them; if one fails, ends the others, who would wait for it."""
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        time.sleep(0.2)
        if any(process.exitcode for process in ranks):
            break
    for process in ranks:
        if process.is_alive():
            process.join(0 if any(p.exitcode for p in ranks) else _JOIN_S)
            process.kill()
