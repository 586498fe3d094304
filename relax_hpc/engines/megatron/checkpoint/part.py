"""A rank's part of a checkpoint: model, optimizer's state, loss scale, random states, step.

All but the random states belong to the whole model, so a checkpoint loads on any grid. Each
data-parallel rank writes its own share of everything, and reads back only what it holds.
"""

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.engines.megatron.checkpoint import boxes, part_files, pickles
from relax_hpc.engines.megatron.checkpoint.boxes import Box
from relax_hpc.engines.megatron.checkpoint.host_copy import HostCopy
from relax_hpc.engines.megatron.checkpoint.read import Stored
from relax_hpc.engines.megatron.hf.hf_weights import VALUE_HEAD
from relax_hpc.engines.megatron.optimizer.weight_bank import WeightBank
from relax_hpc.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_GRID = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data")


class Trainee(NamedTuple):
    """A model in training with all that a checkpoint holds of it."""

    chunks: Sequence[GPTModel]
    optimizer: ChainedOptimizer
    bank: WeightBank
    """The bank; its lasting sets are saved, too."""
    seed: int
    notes: dict[str, Any]
    """Further plain values, alike on all ranks; filled by `load_checkpoint`."""


class CheckpointPart:
    """One rank's part of a checkpoint at the end of a step.

    A copy does not change when training goes on, once `HostCopy.finish` has returned; without one,
    training has to wait for `write`.
    """

    def __init__(self, trainee: Trainee, step: int, host: HostCopy | None) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._boxes, self._copied = _changing(trainee), _nothing
        if host is not None:
            copies, self._copied = host.of([box.tensor for box in self._boxes])
            pairs = zip(self._boxes, copies, strict=True)
            self._boxes = [box._replace(tensor=copy) for box, copy in pairs]
        self._boxes += _kept_boxes(trainee)  # these do not change anyway
        self._objects = {key: _pickled([value]) for key, value in _own_objects(trainee)}
        self._common = {"step": step, "grid": _grid(), **_common(trainee.optimizer)}
        self._common |= {"kept": sorted(trainee.bank.lasting), "notes": dict(trainee.notes)}

    @property
    def num_bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(box.tensor.nbytes for box in self._boxes)

    def write(self, folder: Path) -> None:
        """Writes this rank's part, durably. Not collective; may run in any thread.

        Raises:
            CheckpointError: naming the file and what the system said.
        """
        self._copied()
        part_files.write_part(folder, self._rank, self._boxes, self._objects)

    def write_names(self, folder: Path, **waiting: Any) -> int:  # noqa: ANN401
        """Waits for every rank's part, then makes the checkpoint a whole; one rank does.

        Args:
            waiting: see `part_files.write_names`; so is what is returned and raised.
        """
        return part_files.write_names(folder, self._num_ranks, self._common, **waiting)


def reserve(host: HostCopy, trainee: Trainee) -> None:
    """Begins to take the memory for a copy of what this rank has to save."""
    host.reserve([box.tensor for box in _changing(trainee)])


@torch.no_grad()
def load_checkpoint(folder: Path, trainee: Trainee) -> int:
    """Restores all of a checkpoint, and returns its step. Bitwise if the grid is the same.

    Collective over all ranks: either all of them have loaded it, or all raise. What was loaded
    before an error is in place, so another one has to be loaded then.

    Raises:
        CheckpointError: it is not whole, or damaged; names the file.
        ConfigError: it is of another model.
    """
    failed: Exception | None = None
    step = -1
    try:
        stored = Stored(folder)
        step = int(stored.common["step"])
        weights = [boxes.of_shard(shard) for shard, _ in _tensors(trainee.chunks)]
        stored.fill([*weights, *_optimizer_boxes(trainee, replicas=True)])
        _load_objects(trainee.chunks, stored)
        _set_common(trainee.optimizer, stored.common)
        _load_rng(stored, trainee.seed)
    except (CheckpointError, ConfigError) as error:
        failed = error
    _raise_together(failed)
    _load_kept(stored, trainee)
    trainee.notes.clear()
    trainee.notes.update(stored.common.get("notes", {}))
    return step


@torch.no_grad()
def load_weights(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Fills the chunks from the weights of a checkpoint, of whatever grid. Not collective.

    A critic's head that the checkpoint does not have, being a policy's, stays as it is.

    Raises:
        CheckpointError: it is not whole, or damaged; names the file.
        ConfigError: it is of another model, or of one and its adapters.
    """
    stored = Stored(folder)
    stored.refuse_adapters()
    known = stored.shapes()
    wanted = [boxes.of_shard(shard) for shard, _ in _tensors(chunks)]
    stored.fill([box for box in wanted if box.key in known or VALUE_HEAD not in box.key])
    _load_objects(chunks, stored)


def has_buffers(chunks: Sequence[GPTModel]) -> bool:
    """Whether a checkpoint holds tensors that are no parameters."""
    return any(not isinstance(tensor, torch.nn.Parameter) for _, tensor in _tensors(chunks))


class _Share(NamedTuple):
    """The optimizer's state of a part of one parameter, on a data-parallel rank."""

    start: int
    """First element, counted through the parameter."""
    state: dict[str, Tensor]
    """[n] main parameter and moments."""


def _nothing() -> None: ...


def _changing(trainee: Trainee) -> list[Box]:
    """Returns what this rank writes and training changes, the largest first."""
    return sorted(_own_boxes(trainee), key=lambda box: -box.tensor.nbytes)


def _own_boxes(trainee: Trainee) -> Iterator[Box]:
    """Yields what this rank writes: each element of the model is written by one rank, once.

    Data-parallel ranks share a parameter's weights as they share its optimizer state.
    """
    shares, managed = _shares(trainee.optimizer), _managed(trainee.optimizer)
    for shard, parameter in _tensors(trainee.chunks):
        if parameter not in managed:
            if is_main_replica(shard.replica_id):
                yield boxes.of_shard(shard)
        elif parameter in shares and _is_main_shard(shard):
            start, state = shares[parameter]
            stop = start + state["param"].numel()
            weights = parameter.detach().view(-1)[start:stop]
            yield from boxes.of_range(shard, parameter, shard.key, start, weights)
    yield from _optimizer_boxes(trainee, replicas=False)


def _optimizer_boxes(trainee: Trainee, *, replicas: bool) -> Iterator[Box]:
    """Yields the main parameters and moments that this rank has.

    Args:
        replicas: also where another model-parallel rank has the same ones.
    """
    shares = _shares(trainee.optimizer)
    for shard, parameter in _tensors(trainee.chunks):
        if parameter in shares and (replicas or _is_main_shard(shard)):
            start, state = shares[parameter]
            for name, flat in state.items():
                key = f"optimizer.state.{name}.{shard.key}"
                yield from boxes.of_range(shard, parameter, key, start, flat)


def _kept_boxes(trainee: Trainee) -> Iterator[Box]:
    """Yields lasting sets of the bank, of which data-parallel ranks have a part each."""
    for name in trainee.bank.lasting:
        kept = trainee.bank.kept(name)
        for shard, tensor in _tensors(trainee.chunks):
            is_parameter = isinstance(tensor, torch.nn.Parameter)  # other tensors are not shared
            mine = _is_main_shard(shard) if is_parameter else is_main_replica(shard.replica_id)
            if tensor in kept and mine:
                yield from boxes.of_range(shard, tensor, f"{name}.{shard.key}", *kept[tensor])


def _load_kept(stored: Stored, trainee: Trainee) -> None:
    """Gives the bank back the sets that a checkpoint has; raises as `load`."""
    trainee.bank.forget_own()
    failed: Exception | None = None
    for name in stored.common.get("kept", ()):
        with trainee.bank.lent():
            weights = (boxes.of_shard(shard) for shard, _ in _tensors(trainee.chunks))
            try:
                stored.fill([box._replace(key=f"{name}.{box.key}") for box in weights])
            except (CheckpointError, ConfigError) as error:
                failed = error
            trainee.bank.keep(name, lasting=True)
    _raise_together(failed)


def _layers() -> dict[str, Any]:
    """Tells Megatron to put every layer's tensors under keys of their own, numbered through the
    whole model. It adds groups of this grid to what it is given."""
    return {"non_homogeneous_layers": True}


def _is_main_shard(shard: ShardedTensor) -> bool:
    """Whether no other pipeline stage or tensor-parallel rank is to write the same."""
    return not any(shard.replica_id[:2])


def _tensors(chunks: Sequence[GPTModel]) -> Iterator[tuple[ShardedTensor, Tensor]]:
    """Yields this rank's shards of tensors, each with the parameter or buffer it is part of."""
    for chunk in chunks:
        for entry in nested_values(chunk.sharded_state_dict(metadata=_layers())):
            if isinstance(entry, ShardedTensor):
                yield entry, entry.data
            elif isinstance(entry, ShardedTensorFactory):
                for shard in nested_values(entry.build()):
                    yield shard, entry.data


def _shares(chained: ChainedOptimizer) -> dict[Tensor, _Share]:
    """Returns the shares, by parameter; others have none on this data-parallel rank."""
    shares = {}
    for part in _parts(chained):
        for parameter in part.model_param_gbuf_map:
            state = part._get_main_param_and_optimizer_states(parameter)
            shares[parameter] = _Share(
                part._get_model_param_range_map(parameter)["param"].start,
                {name: value.detach() for name, value in state.items() if name != "step"},
            )
    return shares


def _managed(chained: ChainedOptimizer) -> set[Tensor]:
    """Returns the parameters of this rank that are trained."""
    return {
        p for part in _parts(chained) for buffer in part.buffers for p in buffer.param_index_map
    }


def _parts(chained: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Returns the optimizers: Megatron has extra ones for experts, and empty ones, left out."""
    return [part for part in chained.chained_optimizers if not part.is_stub_optimizer]


def _objects(chunks: Sequence[GPTModel]) -> Iterator[tuple[GPTModel, str, ShardedObject]]:
    """Yields what modules keep that is not a tensor, by name; most keep nothing."""
    for chunk in chunks:
        for name, entry in chunk.sharded_state_dict(metadata=_layers()).items():
            if isinstance(entry, ShardedObject) and entry.data is not None:
                yield chunk, name, entry


def _own_objects(trainee: Trainee) -> Iterator[tuple[str, Any]]:
    for _, _, entry in _objects(trainee.chunks):
        if is_main_replica(entry.replica_id):
            yield entry.unique_key, entry.data
    yield _rng_key(), _rng_state()


def _load_objects(chunks: Sequence[GPTModel], stored: Stored) -> None:
    for chunk, name, entry in _objects(chunks):
        chunk.load_state_dict({name: _object(stored, entry.unique_key)}, strict=False)


def _common(chained: ChainedOptimizer) -> dict[str, Any]:
    """Returns what all ranks have alike that have a share of any parameter, as the first has."""
    counts = {
        float(state["step"]) for part in _parts(chained) for state in part.optimizer.state.values()
    }
    assert len(counts) <= 1, f"parameters were updated {sorted(counts)} times"
    scalers = [part.grad_scaler.state_dict() for part in _parts(chained) if part.grad_scaler]
    return {"num_updates": next(iter(counts), 0.0), "grad_scalers": scalers[:1]}


def _set_common(chained: ChainedOptimizer, common: Mapping[str, Any]) -> None:
    for part in _parts(chained):
        for state in part.optimizer.state.values():
            state["step"].fill_(common["num_updates"])
        for scaler in common["grad_scalers"]:
            if part.grad_scaler:
                part.grad_scaler.load_state_dict(scaler)


def _grid() -> dict[str, int]:
    sizes = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        mpu.get_context_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
        mpu.get_expert_tensor_parallel_world_size(),
        mpu.get_data_parallel_world_size(),
    )
    return dict(zip(_GRID, sizes, strict=True))


def _rng_key() -> str:
    return f"rng/rank_{dist.get_rank()}"


def _rng_state() -> dict[str, Any]:
    state = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _load_rng(stored: Stored, seed: int) -> None:
    if stored.common["grid"] != _grid():
        begin = seed + int(stored.common["step"])
        torch.manual_seed(begin)
        tensor_parallel.model_parallel_cuda_manual_seed(begin, force_reset_rng=True)
        if dist.get_rank() == 0:
            log.info(
                "%s: was saved on the grid %s, this one is %s: random streams begin anew from %d",
                stored.folder, _words(stored.common["grid"]), _words(_grid()), begin,
            )  # fmt: skip
        return
    try:
        state = _object(stored, _rng_key())
    except KeyError:
        raise CheckpointError(
            f"{stored.folder}: has no random state of rank {dist.get_rank()}, though its grid is "
            "this one"
        ) from None
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _words(grid: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in grid.items() if size > 1) or "of one rank"


def _pickled(value: list[Any]) -> bytes:
    """Pickles a value as Megatron does what is not a tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _object(stored: Stored, key: str) -> Any:  # noqa: ANN401
    (value,) = pickles.saved(stored.object(key), stored.folder)
    return value


def _raise_together(failed: Exception | None) -> None:
    """Raises on every rank what one of them found."""
    mine = failed and (isinstance(failed, ConfigError), str(failed))
    for found in all_gather_json(mine):
        if found is not None:
            is_config, message = found
            raise failed or (ConfigError if is_config else CheckpointError)(message)
