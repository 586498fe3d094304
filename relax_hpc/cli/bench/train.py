"""Measures training steps of a model with random weights: tokens per second, MFU, memory, phases.

It uses a run's trainer, fed as the actor does, without the bus, one process per rank. For a shape
only a config.json is written: Megatron-core draws the weights on the GPU.
"""

import gc
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.composition import Objective, objective_of
from relax_hpc.algorithms.part import Rows
from relax_hpc.cli.bench.report import machine
from relax_hpc.cli.bench.shapes import grid_name, job_of, join, row_of, run_ranks
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, none_of
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.text import align_lines
from relax_hpc.schema import Trajectory
from relax_hpc.trainer.megatron import cpu, packing
from relax_hpc.trainer.megatron.costs import PEAK, training_flops
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import read_architecture

if TYPE_CHECKING:
    from relax_hpc.trainer.megatron.trainer import MegatronTrainer

_FORMULA = "(6 N T + 6 layers heads head_dim sum(length^2)) / (seconds x 989e12)"
_WARM_UP = 2
_MEASURED = ("forward", "train", "update", "rates", "flops")
Documents = Literal["one", "mix"]


class ReplicaWork(NamedTuple):
    """The data of one step, per replica."""

    tokens: int
    """Tokens of a micro-batch, split over context-parallel ranks."""
    documents: Documents = "one"
    recompute: str = "none"
    """`none`, `mlp` (one of its products) or `full`."""
    micro_batches: int = 1


@dataclass(frozen=True)
class TrainFigures:
    """One measurement; seconds are medians over the steps."""

    shape: str
    grid: str
    overrides: str
    tokens: int
    documents: Documents
    recompute: str
    micro_batches: int
    step_s: float
    forward_s: float
    """The same micro-batches, without gradient."""
    forward_backward_s: float
    update_s: float
    """Gradient reduction, norm, Adam, and gathering the weights."""
    loss_s: float
    """Advantages and loss of as many tokens, with the gradient by the logprobs, alone."""
    tokens_per_s: float
    """All GPUs together."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Operations of a replica's micro-batches per rank, relative to one rank's peak."""
    peak_gib: float
    """The largest peak of any rank."""
    loss: float


def lengths_of(work: ReplicaWork, seed: int) -> list[int]:
    """Documents of a micro-batch: one, or a long tail of them, new for every seed."""
    if work.documents == "one":
        return [work.tokens]
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := work.tokens - sum(lengths)) > 0:
        length = int(np.clip(rng.lognormal(np.log(600), 1.2), 16, work.tokens // 2))
        lengths.append(length if left - length >= 16 else left)
    return lengths


class TrainTask(NamedTuple):
    """Orders to the ranks of the trainer."""

    folder: Path
    shape: str
    architecture: Architecture
    works: tuple[ReplicaWork, ...]
    config: RunConfig
    """Each work adds its recomputation."""
    steps: int
    overrides: tuple[str, ...]
    profile: Path | None

    @property
    def has_weights(self) -> bool:
        """Whether the model is more than a shape."""
        return any(Path(self.config.model.path).glob("*.safetensors"))

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    @property
    def results(self) -> Path:
        return self.folder / "figures.json"

    def config_of(self, work: ReplicaWork) -> RunConfig:
        actor = self.config.actor
        transformer = dict(actor.transformer)
        if work.recompute == "mlp":
            transformer |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        elif work.recompute == "full":
            chunks = actor.layout.pipeline_parallel * actor.layout.virtual_pipeline
            layers = self.architecture.num_layers // chunks
            transformer |= {"recompute_granularity": "full", "recompute_method": "block",
                            "recompute_num_layers": layers}  # fmt: skip
        update = {"tokens_per_micro_batch": work.tokens, "transformer": transformer}
        return self.config.model_copy(update={"actor": actor.model_copy(update=update)})


def works(
    tokens: Sequence[int], documents: Sequence[str], recompute: str, micro_batches: int
) -> list[ReplicaWork]:
    """Combines every size with every kind of documents.

    Raises:
        ConfigError: no such kind, no such way to recompute.
    """
    for option, values, known in (
        ("--documents", documents, ("one", "mix")),
        ("--recompute", [recompute], ("none", "mlp", "full")),
    ):
        for value in values:
            if value not in known:
                raise ConfigError(f"{option} {value}: {none_of(value, known)}")
    return [
        ReplicaWork(size, "one" if kind == "one" else "mix", recompute, micro_batches)
        for size in tokens
        for kind in documents
    ]


def show(figures: Sequence[TrainFigures], json_file: Path | None) -> str:
    """Formats a line per measurement, with the formula of MFU; writes all of it as JSON if
    requested."""
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
    table = align_lines(lines)
    if json_file is not None:
        rows = [asdict(row) for row in figures]
        write_json(json_file, {"machine": machine(), "mfu": _FORMULA, "rows": rows})
    return "\n".join([f"{machine()}; MFU = {_FORMULA}", *table])


def measure(
    shape: str,
    works: Sequence[ReplicaWork],
    grid: Mapping[str, int],
    *,
    steps: int = 5,
    overrides: Sequence[str] = (),
    profile: Path | None = None,
) -> list[TrainFigures]:
    """Measures every `ReplicaWork` on as many GPUs as the grid has ranks; on CPUs without any.

    Args:
        shape: and overrides, see `shapes.job_of`.
        grid: keys of `Layout`; what is missing is 1.
        profile: gets the table of the profiler for one step of every work, by rank 0.

    Raises:
        ConfigError: no such shape; no such grid, or more ranks than GPUs; micro-batches that do not
            fit the grid.
    """
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
        # Megatron's tensor parallelism overlaps only if kernels start in the order of their launch.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        RunSecret.create(task.secret)
        found = run_ranks(run, task, layout.world_size)
    return [TrainFigures(**figures) for figures in found]


def task_of(
    shape: str,
    works: Sequence[ReplicaWork],
    grid: Mapping[str, int],
    folder: Path,
    *,
    steps: int = 5,
    overrides: Sequence[str] = (),
    profile: Path | None = None,
) -> TrainTask:
    """Makes the orders to the ranks; see `measure`.

    Args:
        folder: an empty one, for shared files.
    """
    tables = {"actor": {"layout": dict(grid)}, "schedule": {"num_steps": 1000}}
    config = job_of(shape, folder, tables, overrides, "bench train")
    layout = config.actor.layout
    for work in works:
        if rest := work.micro_batches % layout.micro_batches_multiple_of:
            raise ConfigError(
                f"--micro-batches {work.micro_batches}: {grid_name(layout)} interleaves chunks of "
                f"layers, which takes a multiple of {layout.micro_batches_multiple_of}; "
                f"use {work.micro_batches - rest + layout.micro_batches_multiple_of}"
            )
    architecture = read_architecture(config.model.path)
    return TrainTask(
        folder, shape, architecture, tuple(works), config, steps, tuple(overrides), profile
    )


def run(rank: int, task: TrainTask) -> None:
    """Measures every work of the task; rank 0 writes after each."""
    cpu.install()  # before Megatron-core is imported
    logging.basicConfig(level=logging.WARNING)
    world, device = join(
        rank, task.config.actor.layout.world_size, task.folder / "rendezvous.json", task.secret
    )
    measured: list[dict[str, Any]] = []
    for work in task.works:
        measured.append(asdict(measure_work(task, work, world, device)))
        if rank == 0:
            task.results.write_text(json.dumps(measured), encoding="utf-8")
        gc.collect()  # the trainer before the next one
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


class BenchBatch(NamedTuple):
    """This rank's rows for one step."""

    rows: list[Trajectory]
    micro_batches: list[list[int]]
    lengths: list[list[int]]
    """Lengths of the documents, per micro-batch."""


Measured = dict[str, list[float]]
"""Seconds of each step by phase, tokens per second of all ranks, operations per second of one."""


def measure_work(
    task: TrainTask, work: ReplicaWork, world: World, device: torch.device
) -> TrainFigures:
    """Takes steps; collective over the ranks of the task's grid."""
    from relax_hpc.roles.training.build import trainer_of

    trainer = trainer_of(task.config_of(work), world, device, random_weights=not task.has_weights)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    objective = objective_of(task.config.algorithm)
    measured: Measured = {name: [] for name in _MEASURED}
    last_loss = 0.0
    for step in range(_WARM_UP + task.steps):
        batch = _batch(task, work, step, trainer.dp_rank)
        dist.barrier()
        begin = _now(device)
        _accumulate(trainer, batch, objective)
        trained = _now(device)
        last_loss = trainer.update()["loss"]
        end = _now(device)
        if step >= _WARM_UP:
            _note(measured, task, batch, begin, trained, end)
    peak = _peak_gib(device)
    for step in range(3):
        batch = _batch(task, work, step, trainer.dp_rank)
        begin = _now(device)
        trainer.forward_logprobs(batch.rows, batch.micro_batches)
        measured["forward"].append(_now(device) - begin)
    if task.profile is not None:
        batch = _batch(task, work, _WARM_UP + task.steps, trainer.dp_rank)

        def one_step() -> None:
            _accumulate(trainer, batch, objective)
            trainer.update()

        _profile(one_step, task.profile if dist.get_rank() == 0 else None, str(work))
    batch = _batch(task, work, 0, trainer.dp_rank)
    first = _add_advantages(batch)[: len(batch.micro_batches[0])]
    of_loss = work.micro_batches * _loss_seconds(task.config.algorithm, first, device)
    return _figures(task, work, measured, peak, last_loss, of_loss)


def _loss_seconds(algorithm: Algorithm, rows: Sequence[Trajectory], device: torch.device) -> float:
    """Median seconds of a micro-batch's advantages and loss, with gradient.

    The gradient is by the logprobs and, if used, the entropy; the output layer's is excluded.
    """
    names = [name.split("/")[1] for name in algorithm.needs.columns]
    tokens = packing.build(
        [row.with_columns(**dict.fromkeys(names, np.zeros((), np.float32))) for row in rows],
        range(len(rows)),
        device=device,
    )
    sampled = tokens.columns["rollout_logprobs"]
    tokens = tokens.with_columns(old_logprobs=sampled - 0.01)
    logprobs = (sampled + 0.01 * torch.randn_like(sampled)).requires_grad_()
    weight = algorithm.entropy.first().weight
    if weight:
        entropy = torch.rand_like(sampled, requires_grad=True)
        tokens = tokens.with_columns(
            entropy=entropy, entropy_weight=torch.full_like(sampled, weight)
        )
    objective = objective_of(algorithm, frozenset(names))
    groups = Rows(
        np.random.default_rng(0).random((max(len(rows) // 8, 1), 8)).astype(np.float32),
        np.ones((max(len(rows) // 8, 1), 8), np.int64),
    )

    def once() -> None:
        algorithm.advantage.of_groups(groups)
        prepared = objective.prepare([tokens], lambda sums: sums) if objective.prepare else [tokens]
        objective.loss(logprobs, prepared[0]).loss.backward()  # type: ignore[no-untyped-call]

    seconds = []
    for _ in range(23):
        begin = _now(device)
        once()
        seconds.append(_now(device) - begin)
    return statistics.median(seconds[3:])  # the first ones allocate


def _peak_gib(device: torch.device) -> float:
    """Most memory of any rank; collective."""
    if device.type != "cuda":
        return 0.0
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _add_advantages(batch: BenchBatch) -> list[Trajectory]:
    return [row.with_columns(advantages=np.ones((), np.float32)) for row in batch.rows]


def _accumulate(trainer: "MegatronTrainer", batch: BenchBatch, objective: Objective) -> None:
    trainer.accumulate(_add_advantages(batch), batch.micro_batches, objective, last=True)


def _note(
    measured: Measured, task: TrainTask, batch: BenchBatch, begin: float, trained: float, end: float
) -> None:
    actor, seconds = task.config.actor, end - begin
    tokens = sum(map(sum, batch.lengths)) * actor.layout.data_parallel
    learn = not actor.lora.rank
    operations = sum(
        training_flops(task.architecture, lengths, weights_learn=learn) for lengths in batch.lengths
    )
    measured["train"].append(trained - begin)
    measured["update"].append(end - trained)
    measured["rates"].append(tokens / seconds)
    measured["flops"].append(operations / actor.layout.replica_size / seconds)


def _figures(
    task: TrainTask, work: ReplicaWork, measured: Measured, peak: float, loss: float, loss_s: float
) -> TrainFigures:
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return TrainFigures(
        shape=task.shape,
        grid=grid_name(task.config.actor.layout),
        overrides=" ".join(task.overrides),
        **work._asdict(),
        step_s=medians["train"] + medians["update"],
        forward_s=medians["forward"],
        forward_backward_s=medians["train"],
        update_s=medians["update"],
        loss_s=loss_s,
        tokens_per_s=medians["rates"],
        tokens_per_s_per_gpu=medians["rates"] / task.config.actor.layout.world_size,
        mfu=medians["flops"] / PEAK,
        peak_gib=peak,
        loss=loss,
    )


def _batch(task: TrainTask, work: ReplicaWork, step: int, dp_rank: int) -> BenchBatch:
    batch = BenchBatch([], [], [])
    replicas = task.config.actor.layout.data_parallel
    for index in range(work.micro_batches):
        seed = (step * work.micro_batches + index) * replicas + dp_rank
        lengths = lengths_of(work, seed)
        first = len(batch.rows)
        batch.rows.extend(_trajectories(task.architecture.vocab_size, lengths, seed))
        batch.micro_batches.append(list(range(first, len(batch.rows))))
        batch.lengths.append(lengths)
    return batch


def _trajectories(vocabulary: int, lengths: Sequence[int], seed: int) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [
        row_of(
            rng.integers(0, vocabulary, length).astype(np.int32), 1,
            np.full(length, -np.log(vocabulary), np.float32), guid=seed, sibling=sibling,
        )
        for sibling, length in enumerate(lengths)
    ]  # fmt: skip


def _profile(step: Callable[[], None], file: Path | None, title: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    if file is None:
        step()
        return
    kinds = [ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiler:
        step()
    key = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=90)
    with file.open("a", encoding="utf-8") as out:
        out.write(f"== {title}\n{table}\n")
        out.writelines(f"idle {gap}\n" for gap in _gaps(profiler))


def _gaps(profiler: Any) -> list[str]:  # noqa: ANN401
    """The longest idle times of the GPU, longest first, with the preceding operation."""
    events = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    gaps, last, before = [], 0, "start"
    for start, end, name in events:
        if last and start > last:
            gaps.append((start - last, before, name))
        if end > last:
            last, before = end, name
    total = sum(gap for gap, *_ in gaps) / 1e6
    longest = sorted(gaps, reverse=True)[:12]
    return [f"{total:.1f} ms in all"] + [
        f"{gap / 1e6:.2f} ms between {a[:60]} and {b[:60]}" for gap, a, b in longest
    ]
