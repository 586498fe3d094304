"""A process of the comparison with TransferQueue; each method is timed where it runs."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from relax_hpc.bus import layout
from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.shards.encode import to_columns
from relax_hpc.bus.shards.shard import Memory, Shard
from relax_hpc.cli.bench.bus import (
    GROUPS,
    NAME,
    Kind,
    renumber,
)
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import COLUMNS, OFFSETS, Columns

FIELDS: dict[Kind, list[str]] = {
    "text": [
        "ragged/token_ids", "ragged/rollout_logprobs", "ragged/loss_mask",
        "row/rewards", "row/prompt_len", "row/policy_version_min", "row/guid",
    ],
    "images": ["ragged/media_bytes"],
}  # fmt: skip
"""Columns that are put and got; the bus writes its other columns besides."""
CHECKED: dict[Kind, str] = {"text": "token_ids", "images": "media_bytes"}


class Worker:
    """Producer or consumer of both sides."""

    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._producers: dict[BusPaths, Producer] = {}
        self._tails: dict[BusPaths, LogTail] = {}
        self._newest: dict[BusPaths, CommitRecord] = {}
        self._memory = Memory()
        self._next_guid = 0

    def pid(self) -> int:
        return os.getpid()

    def load(self, kind: Kind) -> tuple[int, int]:
        """Makes the batch in both forms.

        Returns:
            Bytes that are put and got, and rows.
        """
        self._kind = kind
        self._groups = GROUPS[kind]()
        columns = to_columns(self._groups)
        self._columns: Columns = {name: values.copy() for name, values in columns.items()}
        return sum(columns[name].nbytes for name in FIELDS[kind]), len(columns["row/guid"])

    def queue_put(self, partition: str, *, clean: bool) -> float:
        batch = _tensors(self._columns, self._kind)
        return _seconds(lambda: self._client.put(batch, partition_id=partition), clean=clean)

    def queue_get(
        self, kind: Kind, partition: str, task: str, rows: int, *, clean: bool
    ) -> tuple[float, int]:
        fields = [name.split("/")[1] for name in FIELDS[kind]]
        found: list[Any] = []

        def get() -> None:
            meta = self._client.get_meta(
                data_fields=fields, batch_size=rows, partition_id=partition, task_name=task,
                sampling_config={},
            )  # fmt: skip
            found.append(self._client.get_data(meta))

        taken = _seconds(get, clean=clean)
        return taken, _sum(found[0], kind)

    def queue_clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def bus_create(self, paths: BusPaths) -> None:
        layout.create(paths, [NAME], {})
        self._producers[paths] = Producer(paths, NAME, {"run": "bench"}, spares=1)

    def bus_put(self, paths: BusPaths, *, clean: bool) -> float:
        groups = renumber(self._groups, self._next_guid)
        self._next_guid += len(groups)
        return _seconds(lambda: self._producers[paths].put(groups), clean=clean)

    def bus_retire(self, paths: BusPaths) -> None:
        self._producers[paths].collect(self._next_guid)

    def bus_follow(self, paths: BusPaths) -> None:
        self._tails[paths] = LogTail(paths.log(NAME))

    def bus_get(
        self, paths: BusPaths, kind: Kind, part: int, parts: int, *, clean: bool
    ) -> tuple[float, int]:
        """Share `part` of `parts` of the newest shard, every checksum compared."""
        found: list[Any] = []

        def get() -> None:
            for committed in self._tails[paths].poll():
                if committed.kind is RecordKind.BASE:
                    self._newest[paths] = committed
            record = self._newest[paths]
            self._memory.reset()
            path = paths.shard(NAME, record.fence, record.seq)
            with Shard(path, memory=self._memory) as shard:
                lo, hi = (shard.rows * p // parts for p in (part, part + 1))
                names = [*FIELDS[kind], *(["ragged/media_ref"] if kind == "images" else [])]
                found.append(_tensors(shard.read_span(lo, hi, names), kind))

        taken = _seconds(get, clean=clean)
        return taken, _sum(found[0], kind)


def _tensors(columns: Columns, kind: Kind) -> Any:
    import torch
    from tensordict import TensorDict

    tensors = {}
    for name in FIELDS[kind]:
        tensor = torch.from_numpy(columns[name])
        axis = COLUMNS[name].axis
        if axis != "row":
            offsets = torch.from_numpy(np.ascontiguousarray(columns[OFFSETS[axis]]))
            tensor = torch.nested.nested_tensor_from_jagged(tensor, offsets=offsets)
        tensors[name.split("/")[1]] = tensor
    return TensorDict(tensors, batch_size=(len(next(iter(tensors.values()))),))


def _sum(batch: Any, kind: Kind) -> int:
    tensor = batch[CHECKED[kind]]
    return int((tensor.values() if tensor.is_nested else tensor)[::997].long().sum())


def _seconds(action: Callable[[], object], *, clean: bool) -> float:
    if clean:
        gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
