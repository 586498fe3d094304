"""The communicator of the trainer and a fixed set of engines."""

import itertools
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from relax_hpc.comm.broadcast import BroadcastGroup, Transport, open_store
from relax_hpc.comm.bucket import NamedTensors, flatten
from relax_hpc.comm.world import node_address
from relax_hpc.config import WeightsConfig
from relax_hpc.weights.members import Member


class Receiver(Protocol):
    """What publishing needs of an engine's client; every method raises EngineError."""

    def health(self, timeout_s: float) -> bool: ...
    def version(self) -> int: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def checksum(self) -> str: ...
    def init_weights_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None: ...
    def destroy_weights_group(self, name: str) -> None: ...
    def update_weights_from_disk(self, path: str, version: int) -> None: ...
    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
        last: bool,
    ) -> None: ...


class MemberGroup:
    """Rank 0 is the trainer; the members follow in the order of `receivers`."""

    def __init__(self, receivers: dict[Member, Receiver], name: str, group: BroadcastGroup) -> None:
        self.receivers, self.name, self._group = receivers, name, group

    @classmethod
    def form(
        cls,
        receivers: dict[Member, Receiver],
        config: WeightsConfig,
        device: str,
        threads: ThreadPoolExecutor,
    ) -> "MemberGroup":
        """Joins trainer and members. The engines block while they join, so all are asked at once.

        Raises:
            EngineError: a member refused.
            RuntimeError: a member did not join within `config.timeout_s`.
        """
        backend: Transport = "nccl" if device == "cuda" else "gloo"
        size = 1 + sum(member.num_ranks for member in receivers)
        host, timeout_s = node_address(), config.timeout_s
        store = open_store(host, size, timeout_s=timeout_s)
        # An engine takes a name once, and outlives trainers.
        name = f"relax-weights-{uuid.uuid4().hex[:8]}"
        offsets = itertools.accumulate((m.num_ranks for m in receivers), initial=1)
        joins = [
            threads.submit(
                receiver.init_weights_group, host, store.port, offset, size, name, backend
            )
            for receiver, offset in zip(receivers.values(), offsets, strict=False)
        ]
        group = BroadcastGroup(
            host, store.port, 0, size, name, backend, store=store, timeout_s=timeout_s
        )
        for join in joins:
            join.result(timeout=timeout_s)
        return cls(receivers, name, group)

    def record(self) -> dict[str, object]:
        """The topology, for whoever reads the run directory."""
        offsets = itertools.accumulate((m.num_ranks for m in self.receivers), initial=1)
        return {
            "name": self.name,
            "world_size": self._group.size,
            "members": [
                {"id": m.id, "epoch": m.epoch, "rank_offset": offset, "num_ranks": m.num_ranks}
                for m, offset in zip(self.receivers, offsets, strict=False)
            ],
        }

    def send(self, version: int, staged: list[NamedTensors], threads: ThreadPoolExecutor) -> None:
        """Pauses the members in place and broadcasts; resuming is left to the caller.

        Each bucket is one HTTP call that makes the engine receive, and one broadcast beside it.
        """
        for pause in [threads.submit(r.pause) for r in self.receivers.values()]:
            pause.result()
        for index, bucket in enumerate(staged):
            names = [name for name, _ in bucket]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
            shapes = [list(tensor.shape) for _, tensor in bucket]
            last = index == len(staged) - 1
            replies = [
                threads.submit(
                    receiver.update_weights, names, dtypes, shapes,
                    group=self.name, version=version, last=last,
                )
                for receiver in self.receivers.values()
            ]  # fmt: skip
            self._group.broadcast(flatten(tensor for _, tensor in bucket))
            for reply in replies:
                reply.result()

    def close(self, threads: ThreadPoolExecutor) -> None:
        """Tells the members to leave, without waiting for any: some may be dead."""
        for receiver in self.receivers.values():
            threads.submit(receiver.destroy_weights_group, self.name)
        self._group.close()
