"""One rank of `bench.train`: builds the trainer, takes steps, times them."""

import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.composition import Objective, objective_of
from relax_hpc.algorithms.part import Rows
from relax_hpc.bench.ranks import joined
from relax_hpc.bench.train_task import Figures, Task, Work, grid_name, lengths_of
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron import packing
from relax_hpc.engines.megatron.flops import PEAK, training_flops
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.roles.training.build import trainer_of
from relax_hpc.schema import FinishReason, Trajectory

log = logging.getLogger(__name__)

_WARM_UP = 2


def run(rank: int, task: Task) -> None:
    """Measures every work of the task; rank 0 writes what it finds, after each."""
    logging.basicConfig(level=logging.WARNING)
    world, device = joined(
        rank, task.config.actor.layout.world_size, task.folder / "rendezvous.json", task.secret
    )
    measured: list[dict[str, Any]] = []
    for work in task.works:
        figures = measure(task, work, world, device)
        measured.append(asdict(figures))
        if rank == 0:
            task.results.write_text(json.dumps(measured))
        gc.collect()  # the trainer before the next one
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


class Batch(NamedTuple):
    """The rows that one step trains on, on this rank."""

    rows: list[Trajectory]
    micro_batches: list[list[int]]
    lengths: list[list[int]]
    """Lengths of the documents, per micro-batch."""


@dataclass
class Seconds:
    """Seconds of every timed step."""

    forward: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens per second, of all ranks."""
    flops: list[float] = field(default_factory=list)
    """Floating-point operations per second and rank."""


def measure(task: Task, work: Work, world: World, device: torch.device) -> Figures:
    """Takes steps; collective over the ranks of the task's grid."""
    trainer = trainer_of(task.config_of(work), world, device, random_weights=not task.has_weights)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    objective = objective_of(_algorithm(task))
    seconds, last_loss = Seconds(), 0.0
    for step in range(_WARM_UP + task.steps):
        batch = _batch(task, work, step, trainer.dp_rank)
        dist.barrier()
        begin = _now(device)
        _accumulate(trainer, batch, objective)
        trained = _now(device)
        last_loss = trainer.update()["loss"]
        end = _now(device)
        if step >= _WARM_UP:
            _note(seconds, task, batch, begin, trained, end)
    peak = _peak_gib(device)
    for step in range(3):
        batch = _batch(task, work, step, trainer.dp_rank)
        begin = _now(device)
        trainer.forward_logprobs(batch.rows, batch.micro_batches)
        seconds.forward.append(_now(device) - begin)
    if task.profile is not None:
        batch = _batch(task, work, _WARM_UP + task.steps, trainer.dp_rank)

        def one_step() -> None:
            _accumulate(trainer, batch, objective)
            trainer.update()

        _profile(one_step, task.profile if dist.get_rank() == 0 else None, str(work))
    batch = _batch(task, work, 0, trainer.dp_rank)
    first = _valued(batch)[: len(batch.micro_batches[0])]
    of_loss = work.micro_batches * _loss_seconds(_algorithm(task), first, device)
    return _figures(task, work, seconds, peak, last_loss, of_loss)


def _loss_seconds(algorithm: Algorithm, rows: Sequence[Trajectory], device: torch.device) -> float:
    """Median seconds of the advantages of a micro-batch's rows, and of its loss with gradient.

    The gradient is that by the logprobs and, where the loss has it, the entropy; the output layer's
    is no part of it.
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


def _algorithm(task: Task) -> Algorithm:
    assert isinstance(task.config, RunConfig)
    return task.config.algorithm


def _valued(batch: Batch) -> list[Trajectory]:
    return [row.with_columns(advantages=np.ones((), np.float32)) for row in batch.rows]


def _accumulate(trainer: MegatronTrainer, batch: Batch, objective: Objective) -> None:
    trainer.accumulate(_valued(batch), batch.micro_batches, objective, last=True)


def _note(
    seconds: Seconds, task: Task, batch: Batch, begin: float, trained: float, end: float
) -> None:
    seconds.train.append(trained - begin)
    seconds.update.append(end - trained)
    actor = task.config.actor
    tokens = sum(map(sum, batch.lengths)) * actor.layout.data_parallel
    seconds.rates.append(tokens / (end - begin))
    learn = not actor.lora.rank
    of_batch = sum(
        training_flops(task.architecture, lengths, weights_learn=learn) for lengths in batch.lengths
    )
    seconds.flops.append(of_batch / actor.layout.replica_size / (end - begin))


def _figures(
    task: Task, work: Work, seconds: Seconds, peak: float, loss: float, loss_s: float
) -> Figures:
    train, update = statistics.median(seconds.train), statistics.median(seconds.update)
    rate = statistics.median(seconds.rates)
    return Figures(
        shape=task.shape,
        grid=grid_name(task.config.actor.layout),
        overrides=" ".join(task.overrides),
        tokens=work.tokens,
        documents=work.documents,
        recompute=work.recompute,
        micro_batches=work.micro_batches,
        step_s=train + update,
        forward_s=statistics.median(seconds.forward),
        forward_backward_s=train,
        update_s=update,
        loss_s=loss_s,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / task.config.actor.layout.world_size,
        mfu=statistics.median(seconds.flops) / PEAK,
        peak_gib=peak,
        loss=loss,
    )


def _batch(task: Task, work: Work, step: int, dp_rank: int) -> Batch:
    batch = Batch([], [], [])
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
    rows: list[Trajectory] = []
    for sibling, length in enumerate(lengths):
        mask = np.ones(length, np.uint8)
        mask[:1] = 0
        rows.append(
            Trajectory(
                guid=seed,
                sibling=sibling,
                prompt_index=0,
                seed=0,
                token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                prompt_len=1,
                loss_mask=mask,
                columns={"rollout_logprobs": np.full(length, -np.log(vocabulary), np.float32)},
                version_runs=np.array([[1, 0]], np.int32),
                finish=FinishReason.STOP,
                reward=0.0,
            )
        )
    return rows


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
    with file.open("a") as out:
        out.write(f"== {title}\n{table}\n")
        out.writelines(f"idle {gap}\n" for gap in _gaps(profiler))


def _gaps(profiler: Any) -> list[str]:  # noqa: ANN401
    """The longest times the GPU had nothing to do, longest first, with what came before."""
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
