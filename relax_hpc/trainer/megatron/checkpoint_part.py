"""Saves and loads a rank's part of a checkpoint: model, optimizer, loss scale, random states, step.

All but the random states belong to the whole model, so a checkpoint loads on any grid. Each
data-parallel rank writes its own share of everything, and reads back only its own.

A checkpoint names every part by its place in the whole tensor, so that ranks of another grid find
what they need. A data-parallel rank has the optimizer state of a range of elements of a parameter's
shard, from within one row to within another: at most five boxes of a matrix.
"""

import io
import logging
import math
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

from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.runtime.comm.torch_group import all_gather_json
from relax_hpc.trainer.megatron import checkpoint_files
from relax_hpc.trainer.megatron.checkpoint_files import Box, StoredCheckpoint
from relax_hpc.trainer.megatron.hf_weights import VALUE_HEAD
from relax_hpc.trainer.megatron.host_memory import HostCopy
from relax_hpc.trainer.megatron.weight_bank import WeightBank

log = logging.getLogger(__name__)

_GRID = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data")


class Trainee(NamedTuple):
    """A model in training with everything in its checkpoint."""

    chunks: Sequence[GPTModel]
    optimizer: ChainedOptimizer
    bank: WeightBank
    """The bank; its lasting sets are saved, too."""
    seed: int
    notes: dict[str, Any]
    """Further plain values, the same on all ranks; filled by `load_checkpoint`."""


class MegatronCheckpointPart:
    """One rank's part of a checkpoint at the end of a step.

    A copy is independent of training, once `HostCopy.finish` has returned; without one, training
    has to wait for `write`.
    """

    def __init__(self, trainee: Trainee, step: int, host: HostCopy | None) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._boxes, self._copied = _changing(trainee), _nothing
        if host is not None:
            copies, self._copied = host.of([box.tensor for box in self._boxes])
            pairs = zip(self._boxes, copies, strict=True)
            self._boxes = [box._replace(tensor=copy) for box, copy in pairs]
        self._boxes += _list_kept_boxes(trainee)  # these do not change anyway
        self._objects = {key: _pickle([value]) for key, value in _own_objects(trainee)}
        self._common = {"step": step, "grid": _grid(), **_common(trainee.optimizer)}
        self._common |= {"kept": sorted(trainee.bank.lasting), "notes": dict(trainee.notes)}

    @property
    def num_bytes(self) -> int:
        return sum(box.tensor.nbytes for box in self._boxes)

    def write(self, folder: Path) -> None:
        """Writes this rank's part, durably. Not collective; may run in any thread.

        Raises:
            CheckpointError: has the file and the system's error.
        """
        self._copied()
        checkpoint_files.write_part(folder, self._rank, self._boxes, self._objects)

    def write_names(self, folder: Path, **waiting: Any) -> int:  # noqa: ANN401
        """Waits for every rank's part, then completes the checkpoint; called on one rank.

        Args:
            waiting: as in `checkpoint_files.write_names`, which also has returns and errors.
        """
        return checkpoint_files.write_names(folder, self._num_ranks, self._common, **waiting)


def reserve(host: HostCopy, trainee: Trainee) -> None:
    host.reserve([box.tensor for box in _changing(trainee)])


@torch.no_grad()
def load_checkpoint(folder: Path, trainee: Trainee) -> int:
    """Restores a checkpoint, and returns its step. Bitwise if the grid is the same.

    Collective over all ranks: either all of them have loaded it, or all raise. After an error parts
    of it are in place, so another one has to be loaded.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
        ConfigError: it is of another model.
    """
    failed: Exception | None = None
    step = -1
    try:
        stored = StoredCheckpoint(folder)
        step = int(stored.common["step"])
        weights = [of_shard(shard) for shard, _ in _tensors(trainee.chunks)]
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
    """Fills the chunks from the weights of a checkpoint, of any grid. Not collective.

    A critic's head stays unchanged if the checkpoint is a policy's.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
        ConfigError: it is of another model, or of one and its adapters.
    """
    stored = StoredCheckpoint(folder)
    stored.refuse_adapters()
    known = stored.shapes()
    wanted = [of_shard(shard) for shard, _ in _tensors(chunks)]
    stored.fill([box for box in wanted if box.key in known or VALUE_HEAD not in box.key])
    _load_objects(chunks, stored)


def has_buffers(chunks: Sequence[GPTModel]) -> bool:
    """Whether a checkpoint holds tensors that are not parameters."""
    return any(not isinstance(tensor, torch.nn.Parameter) for _, tensor in _tensors(chunks))


class _Share(NamedTuple):
    """A data-parallel rank's optimizer state for a part of one parameter."""

    start: int
    """First element within the parameter."""
    state: dict[str, Tensor]
    """[n] main parameter and moments."""


def _nothing() -> None: ...


def _changing(trainee: Trainee) -> list[Box]:
    """Returns the boxes that this rank writes and training changes, the largest first."""
    return sorted(_own_boxes(trainee), key=lambda box: -box.tensor.nbytes)


def _own_boxes(trainee: Trainee) -> Iterator[Box]:
    """Yields the boxes that this rank writes: each element of the model is written once.

    Data-parallel ranks share a parameter's weights as they share its optimizer state.
    """
    shares, managed = _shares(trainee.optimizer), _list_trained(trainee.optimizer)
    for shard, parameter in _tensors(trainee.chunks):
        if parameter not in managed:
            if is_main_replica(shard.replica_id):
                yield of_shard(shard)
        elif parameter in shares and _is_main_shard(shard):
            start, state = shares[parameter]
            stop = start + state["param"].numel()
            weights = parameter.detach().view(-1)[start:stop]
            yield from of_range(shard, parameter, shard.key, start, weights)
    yield from _optimizer_boxes(trainee, replicas=False)


def _optimizer_boxes(trainee: Trainee, *, replicas: bool) -> Iterator[Box]:
    shares = _shares(trainee.optimizer)
    for shard, parameter in _tensors(trainee.chunks):
        if parameter in shares and (replicas or _is_main_shard(shard)):
            start, state = shares[parameter]
            for name, flat in state.items():
                key = f"optimizer.state.{name}.{shard.key}"
                yield from of_range(shard, parameter, key, start, flat)


def _list_kept_boxes(trainee: Trainee) -> Iterator[Box]:
    """Yields lasting sets of the bank, each data-parallel rank its part."""
    for name in trainee.bank.lasting:
        kept = trainee.bank.get_part(name)
        for shard, tensor in _tensors(trainee.chunks):
            is_parameter = isinstance(tensor, torch.nn.Parameter)  # other tensors are not shared
            mine = _is_main_shard(shard) if is_parameter else is_main_replica(shard.replica_id)
            if tensor in kept and mine:
                yield from of_range(shard, tensor, f"{name}.{shard.key}", *kept[tensor])


def _load_kept(stored: StoredCheckpoint, trainee: Trainee) -> None:
    trainee.bank.forget_own()
    failed: Exception | None = None
    for name in stored.common.get("kept", ()):
        with trainee.bank.lent():
            weights = (of_shard(shard) for shard, _ in _tensors(trainee.chunks))
            try:
                stored.fill([box._replace(key=f"{name}.{box.key}") for box in weights])
            except (CheckpointError, ConfigError) as error:
                failed = error
            trainee.bank.keep(name, lasting=True)
    _raise_together(failed)


def _layers() -> dict[str, Any]:
    """Returns Megatron's setting that numbers every layer's tensors through the whole model. A copy
    each time: Megatron adds groups of this grid to it."""
    return {"non_homogeneous_layers": True}


def _is_main_shard(shard: ShardedTensor) -> bool:
    """Whether no other pipeline stage or tensor-parallel rank writes the same."""
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
    shares = {}
    for part in _parts(chained):
        for parameter in part.model_param_gbuf_map:
            state = part._get_main_param_and_optimizer_states(parameter)
            shares[parameter] = _Share(
                part._get_model_param_range_map(parameter)["param"].start,
                {name: value.detach() for name, value in state.items() if name != "step"},
            )
    return shares


def _list_trained(chained: ChainedOptimizer) -> set[Tensor]:
    return {
        p for part in _parts(chained) for buffer in part.buffers for p in buffer.param_index_map
    }


def _parts(chained: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Returns the non-empty optimizers: Megatron has extra ones for experts."""
    return [part for part in chained.chained_optimizers if not part.is_stub_optimizer]


def _objects(chunks: Sequence[GPTModel]) -> Iterator[tuple[GPTModel, str, ShardedObject]]:
    """Yields non-tensor state of modules, by name; most have none."""
    for chunk in chunks:
        for name, entry in chunk.sharded_state_dict(metadata=_layers()).items():
            if isinstance(entry, ShardedObject) and entry.data is not None:
                yield chunk, name, entry


def _own_objects(trainee: Trainee) -> Iterator[tuple[str, Any]]:
    for _, _, entry in _objects(trainee.chunks):
        if is_main_replica(entry.replica_id):
            yield entry.unique_key, entry.data
    yield _rng_key(), _rng_state()


def _load_objects(chunks: Sequence[GPTModel], stored: StoredCheckpoint) -> None:
    for chunk, name, entry in _objects(chunks):
        chunk.load_state_dict({name: _object(stored, entry.unique_key)}, strict=False)


def _common(chained: ChainedOptimizer) -> dict[str, Any]:
    """Returns the state common to all ranks with a share of any parameter."""
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


def _load_rng(stored: StoredCheckpoint, seed: int) -> None:
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


def _pickle(value: list[Any]) -> bytes:
    """Pickles a value as Megatron does non-tensors."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _object(stored: StoredCheckpoint, key: str) -> Any:  # noqa: ANN401
    (value,) = checkpoint_files.load(stored.object(key), stored.folder)
    return value


def _raise_together(failed: Exception | None) -> None:
    mine = failed and (isinstance(failed, ConfigError), str(failed))
    for found in all_gather_json(mine):
        if found is not None:
            is_config, message = found
            raise failed or (ConfigError if is_config else CheckpointError)(message)


def of_shard(shard: ShardedTensor) -> Box:
    """Returns all that a rank has of a tensor."""
    ones = (1,) * shard.prepend_axis_num
    data = shard.data.detach().view(*ones, *shard.local_shape)
    return Box(shard.key, tuple(shard.global_offset), tuple(shard.global_shape), data)


def of_range(
    shard: ShardedTensor, parameter: Tensor, key: str, start: int, flat: Tensor
) -> Iterator[Box]:
    """Yields the boxes of a range of a parameter's elements.

    Args:
        shard: of the parameter or a view of it.
        start: first element of the range within the parameter.
        flat: [n] value for each element of the range.
    """
    data, ones = shard.data, (1,) * shard.prepend_axis_num
    assert data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr(), shard.key
    first = data.storage_offset() - parameter.storage_offset()
    stop = start + flat.numel()
    for place, shape, position in cut(tuple(data.shape), data.stride(), first, start, stop):
        within = (0,) * shard.prepend_axis_num + place
        offset = tuple(a + b for a, b in zip(shard.global_offset, within, strict=True))
        part = flat[position - start :][: math.prod(shape)].view(*ones, *shape)
        yield Box(key, offset, tuple(shard.global_shape), part)


_Cut = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offset and shape of a box in a tensor, and position of its first element in memory."""


def cut(
    shape: Sequence[int], strides: Sequence[int], first: int, start: int, stop: int
) -> Iterator[_Cut]:
    """Yields boxes of a strided tensor, each contiguous in memory, that make up its part in a
    range.

    Args:
        first: position of the tensor's first element in memory.
        start: of the range in memory, which ends before `stop`.
    """
    if tuple(strides) == _row_major(shape):
        begin, end = max(start - first, 0), min(stop - first, math.prod(shape))
        for place, size, position in _rows(tuple(shape), begin, end):
            yield place, size, first + position
        return
    assert len(shape) > 1, f"elements {strides[0]} apart: such a view has no boxes"
    for row in range(shape[0]):
        inner = cut(shape[1:], strides[1:], first + row * strides[0], start, stop)
        for place, size, position in inner:
            yield (row, *place), (1, *size), position


def _rows(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Cut]:
    """Yields boxes of elements begin <= i < end of a contiguous tensor, in order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape), begin
        return
    size = math.prod(shape[1:])
    head = min(-(-begin // size) * size, end)  # where a broken first row ends
    tail = max(end // size * size, head)  # where a broken last one begins
    yield from _within_row(shape, begin, head)
    if head < tail:
        rows = (tail - head) // size
        yield (head // size, *[0] * len(shape[1:])), (rows, *shape[1:]), head
    yield from _within_row(shape, tail, end)


def _within_row(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Cut]:
    size = math.prod(shape[1:])
    row, low = begin // size, begin // size * size
    for place, inner, position in _rows(shape[1:], begin - low, end - low):
        yield (row, *place), (1, *inner), low + position


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
