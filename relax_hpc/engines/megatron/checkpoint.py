"""The trainer's checkpoint: Megatron's distributed format, model, optimizer, RNG and step.

Model and optimizer load at any tensor- and data-parallel size; random states only at the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer

_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


class Trainee(NamedTuple):
    """What a checkpoint is of."""

    chunks: Sequence[GPTModel]
    optimizer: ChainedOptimizer


def save(folder: Path, trainee: Trainee, step: int) -> None:
    """Writes into the empty folder. Collective over all ranks."""
    state = _sharded_state(trainee, loading=False)
    state |= {"step": step, "grid": _grid(), "rng": _rng_slot(_rng_state())}
    dist_checkpointing.save(state, str(folder), sharded_strategy=_InProcess("torch_dist", 1))


def load(folder: Path, trainee: Trainee) -> int:
    """Restores what `save` wrote, and returns its step. Collective over all ranks."""
    common = dist_checkpointing.load_common_state_dict(str(folder))
    state = _sharded_state(trainee, loading=True)
    same_grid = tuple(common["grid"]) == _grid()
    if same_grid:
        state["rng"] = _rng_slot(None)
    loaded = dist_checkpointing.load(state, str(folder))
    for key, chunk in zip(_keys(trainee.chunks), trainee.chunks, strict=True):
        chunk.load_state_dict(loaded[key])
    _load_optimizer(trainee.optimizer, loaded["optimizer"])
    if same_grid:
        _set_rng_state(loaded["rng"])
    return int(common["step"])


class _InProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by this process.

    The stock strategy starts writer processes and a server for their results, which outlive a rank
    that is killed, on the node and with the rank's pipes open.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def _sharded_state(trainee: Trainee, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict()
        for key, chunk in zip(_keys(trainee.chunks), trainee.chunks, strict=True)
    }
    optimizer = trainee.optimizer.sharded_state_dict(state, is_loading=loading, metadata=_SHARDING)
    if loading:
        _own_step_counts(trainee.optimizer)
    return state | {"optimizer": optimizer}


def _keys(chunks: Sequence[GPTModel]) -> list[str]:
    """Names that Megatron's distributed optimizer knows."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


@torch.no_grad()
def _load_optimizer(chained: ChainedOptimizer, state: dict[str, Any]) -> None:
    # Megatron-core 0.16 restores Adam's step count apart from the moments and then trips over
    # finding it among them: take it out while the moments load.
    (part,) = chained.chained_optimizers
    moments = state.pop("param_state")
    state.pop("param_state_sharding_type")
    part.load_state_dict(state)
    states = part.optimizer.state
    steps = {parameter: values.pop("step") for parameter, values in states.items()}
    part.load_parameter_state_from_fully_reshardable(moments)
    for parameter, step in steps.items():
        states[parameter]["step"] = step
    _own_step_counts(chained)


def _own_step_counts(chained: ChainedOptimizer) -> None:
    """Megatron gives all parameters one count tensor, which Adam would then raise once for each."""
    for part in chained.chained_optimizers:
        for values in part.optimizer.state.values():
            values["step"] = values["step"].clone()


def _grid() -> tuple[int, int]:
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_data_parallel_world_size()


def _rng_slot(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _rng_state() -> dict[str, Any]:
    state = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
