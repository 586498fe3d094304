"""Reports a trainer's or scorer's GPU memory before a job, and explains out-of-memory errors."""

import re

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import GpuMemoryError, first_line
from relax_hpc.roles.role import Say
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.models.architecture import Architecture

_TRAINED = ("actor", "critic")
_OF_NCCL = re.compile(r"out of memory|Failed to CUDA \w*alloc", re.IGNORECASE)


def tell(config: JobConfig, shape: Architecture, say: Say) -> None:
    """Reports how much of a GPU the actor keeps, and what that does not include."""
    actor = config.actor
    found = fit.count_held(
        actor, actor.optimizer, shape, config.model.dtype, frozen=actor.frozen, lora=actor.lora
    )
    if found is None or not actor.resources.gpus_per_node:
        return
    weights, gradients, optimizer, whole = (each / 2**30 for each in (*found, sum(found)))
    line = (
        f"GPU memory: a rank of the actor keeps {whole:.1f} GiB (weights {weights:.1f}, gradients "
        f"{gradients:.1f}, optimizer {optimizer:.1f}), beside what a micro-batch of "
        f"{actor.tokens_per_micro_batch:,} tokens needs{_of_micro_batch(config, shape)}"
    )
    if isinstance(config, RunConfig) and config.rollout_pool.placement == "actor":
        line += f"; {weights + optimizer:.1f} GiB while engines sample there"
    say(line)


_SAVED_SHARE = 0.8
"""Share of the inputs of a layer's operators that its backward pass keeps: measured, 3.2 MB a token
for Qwen3-4B's shape, 0.8 MB for Qwen2.5-0.5B's."""


def _of_micro_batch(config: JobConfig, shape: Architecture) -> str:
    """Estimates the activations of a text model on one pipeline stage."""
    actor, layers, hidden = config.actor, shape.num_layers, shape.hidden_size
    if actor.layout.pipeline_parallel > 1 or shape.experts or shape.vision:
        return ""
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    of_layer = _SAVED_SHARE * 2 * (4 * hidden + 3 * heads + 3 * shape.ffn_hidden_size)
    recomputes = actor.transformer.get("recompute_granularity") == "full"
    of_token = layers * 2 * hidden + of_layer if recomputes else layers * of_layer
    ranks = actor.layout.tensor_parallel * actor.layout.context_parallel
    return f", about {of_token * actor.tokens_per_micro_batch / ranks / 2**30:.1f} GiB"


def explain(error: Exception, config: JobConfig, component: str) -> GpuMemoryError | None:
    """Returns an error with remedies, if `error` means that a GPU is out of memory."""
    name, said = type(error).__name__, str(error)
    if name == "DistBackendError" and (found := _OF_NCCL.search(said)):
        what = "NCCL: " + said[found.start() :].splitlines()[0]
    elif name == "OutOfMemoryError":
        what = first_line(error)
    else:
        return None
    return GpuMemoryError(
        f"a GPU of {component} is full; use {', or '.join(_remedies(config, component))} "
        f"(docs/explanation/trainer.md, Memory of a GPU): {what}"
    )


def _remedies(config: JobConfig, component: str) -> list[str]:
    """Lists unused options that save memory, cheapest first."""
    actor, found = config.actor, list[str]()
    trains = component in _TRAINED
    if trains and actor.optimizer.moments == "float32":
        found.append('actor.optimizer.moments = "bfloat16"')
    found.append(f"actor.tokens_per_micro_batch below {actor.tokens_per_micro_batch}")
    if trains and actor.transformer.get("recompute_granularity") != "full":
        found.append(
            'actor.transformer.recompute_granularity = "full" (with recompute_method = "uniform" '
            "and recompute_num_layers = 1)"
        )
    if trains and actor.optimizer.offload < 1:
        found.append("actor.optimizer.offload = 1.0")
    return [*found, "more ranks of data_parallel" if trains else "more ranks of tensor_parallel"]
