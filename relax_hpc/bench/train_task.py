"""The orders of `bench.train` to its ranks, and their measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from relax_hpc.config.layout import Layout
from relax_hpc.config.run import JobConfig
from relax_hpc.models.architecture import Architecture

Documents = Literal["one", "mix"]


class Work(NamedTuple):
    """The data of one step, per replica."""

    tokens: int
    """Tokens of a micro-batch; context-parallel ranks share them."""
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
    """Keys of `Layout`, by their short names."""
    return {_SHORT[short]: size for short, size in sizes.items()}


def grid_name(layout: Layout) -> str:
    """Data and tensor parallelism, and what else there is: "dp1 tp2 cp2"."""
    return " ".join(
        f"{short}{size}"
        for short, name in _SHORT.items()
        if (size := getattr(layout, name)) > 1 or short in ("dp", "tp")
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
    """Seconds of the same micro-batches, without gradient."""
    forward_backward_s: float
    update_s: float
    """Gradient reduction, norm, Adam, and gathering the weights."""
    loss_s: float
    """Advantages and the loss of as many tokens, with its gradient by the logprobs, alone."""
    tokens_per_s: float
    """Tokens per second of all GPUs together."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Operations of a replica's micro-batches, divided by its ranks, against the peak of one."""
    peak_gib: float
    """Peak of the rank that has most."""
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


class Task(NamedTuple):
    """Orders to the ranks of the trainer."""

    folder: Path
    shape: str
    architecture: Architecture
    """Architecture of the shape."""
    works: tuple[Work, ...]
    config: JobConfig
    """Config of the job; each work adds what it recomputes."""
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
            chunks = actor.layout.pipeline_parallel * actor.layout.virtual_pipeline
            layers = self.architecture.num_layers // chunks
            transformer |= {"recompute_granularity": "full", "recompute_method": "block",
                            "recompute_num_layers": layers}  # fmt: skip
        update = {"tokens_per_micro_batch": work.tokens, "transformer": transformer}
        return self.config.model_copy(update={"actor": actor.model_copy(update=update)})
