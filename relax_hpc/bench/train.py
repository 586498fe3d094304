"""Training steps of a model with random weights: tokens per second, MFU, memory, time per phase.

It is the trainer of a run, fed as the actor feeds it, without the bus. Of a shape nothing but a
config.json is written: Megatron-core draws the weights on the GPU.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from relax_hpc.bench.report import machine
from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.layout import GridConfig
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import with_overrides
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.registry import read_architecture
from relax_hpc.records import write_json
from relax_hpc.run_secret import RunSecret
from relax_hpc.scratch import scratch_folder

Documents = Literal["one", "mix"]
_FORMULA = "(6 N T + 6 layers heads head_dim sum(length^2)) / (seconds x 989e12)"
_JOIN_S = 120

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728,
                          "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072,
                            "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-30b-a3b": _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"],
                               "model_type": "qwen3_moe", "hidden_size": 2048,
                               "intermediate_size": 6144, "moe_intermediate_size": 768,
                               "num_experts": 128, "num_experts_per_tok": 8,
                               "norm_topk_prob": True, "decoder_sparse_step": 1,
                               "mlp_only_layers": [], "router_aux_loss_coef": 1e-3,
                               "num_hidden_layers": 48, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": _QWEN3 | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2,
                      "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                      "num_attention_heads": 4},
}  # fmt: skip
"""config.json of what can be measured; `tiny` is for machines without a GPU."""


class Work(NamedTuple):
    """What one step trains on, per replica."""

    tokens: int
    """Of a micro-batch; context-parallel ranks share them."""
    documents: Documents = "one"
    recompute: str = "none"
    """`none`, `mlp` (one of its products again) or `full`."""
    micro_batches: int = 1


_SHORT = {
    "dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline", "cp": "context_parallel", "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}  # fmt: skip


def grid_of(**sizes: int) -> dict[str, int]:
    """Keys of `GridConfig`, by their short names."""
    return {_SHORT[short]: size for short, size in sizes.items()}


def grid_name(grid: GridConfig) -> str:
    """Data and tensor parallelism, and what else there is: "dp1 tp2 cp2"."""
    return " ".join(
        f"{short}{size}"
        for short, name in _SHORT.items()
        if (size := getattr(grid, name)) > 1 or short in ("dp", "tp")
    )


@dataclass(frozen=True)
class Figures:
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
    """Of the same micro-batches, without gradient."""
    forward_backward_s: float
    update_s: float
    """Gradient reduction, norm, Adam, and gathering the weights."""
    tokens_per_s: float
    """Of all GPUs together."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Operations of a replica's micro-batches, divided by its ranks, against the peak of one."""
    peak_gib: float
    """Of the rank that has most."""
    loss: float


def lengths_of(work: Work, seed: int) -> list[int]:
    """Documents of a micro-batch: one, or a long tail of them, new for every seed."""
    if work.documents == "one":
        return [work.tokens]
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := work.tokens - sum(lengths)) > 0:
        length = int(np.clip(rng.lognormal(np.log(600), 1.2), 16, work.tokens // 2))
        lengths.append(length if left - length >= 16 else left)
    return lengths


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
             "forward", "+ backward", "update", "peak")  # fmt: skip
    lines: list[tuple[str, ...]] = [heads]
    for row in figures:
        phases = (row.step_s, row.forward_s, row.forward_backward_s, row.update_s)
        lines.append((
            row.grid, f"{row.micro_batches} x {row.tokens}", row.documents, row.recompute,
            f"{row.tokens_per_s:.0f}", f"{row.tokens_per_s_per_gpu:.0f}", f"{row.mfu:.1%}",
            *(f"{1e3 * phase:.0f} ms" for phase in phases), f"{row.peak_gib:.1f} GiB",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(map(str.rjust, line, widths)) for line in lines]
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
        grid: keys of `GridConfig`; what is missing is 1.
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
        actor, gpus = task.config.actor, torch.cuda.device_count()
        if gpus and actor.world_size > gpus:
            raise ConfigError(
                f"{grid_name(actor)}: {actor.world_size} ranks, but {gpus} GPUs are here; use fewer"
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
) -> "Task":
    """What the ranks are told; see `measure`.

    Args:
        folder: an empty one, for what they share.
    """
    model = model_folder(shape, folder)
    config = with_overrides(_tree(model, grid), overrides, source="bench train")
    for work in works:
        _check_micro_batches(work, config.actor)
    architecture = read_architecture(model)
    return Task(folder, shape, architecture, tuple(works), config, steps, tuple(overrides), profile)


def model_folder(shape: str, folder: Path) -> Path:
    """Where the model's config.json is: in a folder of the user's, or written to `folder`."""
    if (Path(shape) / "config.json").is_file():
        return Path(shape)
    if shape not in SHAPES:
        raise ConfigError(
            f"--shape {shape}: is none of {', '.join(SHAPES)}, nor a folder with a config.json"
        )
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


class Task(NamedTuple):
    folder: Path
    shape: str
    architecture: Architecture
    """That of the shape."""
    works: tuple[Work, ...]
    config: JobConfig
    """Of the job; each work adds what it recomputes."""
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

    def config_of(self, work: Work) -> JobConfig:
        """The job that measures `work`."""
        actor = self.config.actor
        transformer = dict(actor.transformer)
        if work.recompute == "mlp":
            transformer |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        elif work.recompute == "full":
            layers = self.architecture.num_layers // actor.pipeline_parallel
            transformer |= {"recompute_granularity": "full", "recompute_method": "block",
                            "recompute_num_layers": layers // actor.virtual_pipeline}  # fmt: skip
        update = {"tokens_per_micro_batch": work.tokens, "transformer": transformer}
        return self.config.model_copy(update={"actor": actor.model_copy(update=update)})


def _tree(model: Path, grid: Mapping[str, int]) -> dict[str, Any]:
    """A job."""
    import torch

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return {
        "name": "bench",
        "model": {"path": str(model), "dtype": dtype},
        "prompts": {"train": "unused", "heldout": "unused"},
        "actor": dict(grid),
        "algorithm": {"num_steps": 1000},
    }


def _check_micro_batches(work: Work, actor: ActorConfig) -> None:
    if rest := work.micro_batches % actor.micro_batches_multiple_of:
        raise ConfigError(
            f"--micro-batches {work.micro_batches}: {grid_name(actor)} interleaves chunks of "
            f"layers, which takes a multiple of {actor.micro_batches_multiple_of}; "
            f"use {work.micro_batches - rest + actor.micro_batches_multiple_of}"
        )


def _on_ranks(task: Task) -> list[Figures]:
    # Megatron's tensor parallelism overlaps only if kernels start in the order they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    RunSecret.create(task.secret)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_on_rank, args=(rank, task), daemon=False)
        for rank in range(task.config.actor.world_size)
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
