"""Receiving weights from the trainer's broadcast, with SGLang's request fields."""

from collections.abc import Sequence
from typing import Literal

import torch

from relax_hpc.comm.broadcast import BroadcastGroup, Transport
from relax_hpc.comm.bucket import NamedTensors, num_bytes, unflatten
from relax_hpc.errors import EngineError

LoadFormat = Literal["flattened_bucket"] | None


class WeightGroups:
    """The broadcast groups this engine is a member of, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, BroadcastGroup] = {}
        self._over: set[str] = set()

    def give_up(self, name: str | None = None) -> None:
        """Ends all waiting for tensors of group `name`, or of any; call it from any thread.

        A trainer that leaves a group, or makes another one, has given an update up, and its end of
        the connection may outlive that.
        """
        self._over.update(self._groups if name is None else self._groups.keys() & {name})

    def join(
        self, host: str, port: int, rank: int, world_size: int, name: str, backend: Transport
    ) -> None:
        """Blocks until all ranks of the group are there.

        A group of that name is replaced: its trainer died without a farewell.
        """
        if name in self._groups:
            self.leave(name)
        self._groups[name] = BroadcastGroup(host, port, rank, world_size, name, backend)

    def leave(self, name: str) -> None:
        """Leaves the group.

        Raises:
            EngineError: not a member.
        """
        self._get(name)
        self._groups.pop(name).close()
        self._over.discard(name)

    def receive(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        load_format: LoadFormat,
    ) -> NamedTensors:
        """Receives tensors from rank 0: one broadcast of their bytes, or one for each.

        Raises:
            EngineError: not a member, or the trainer gave this update up.
        """
        group = self._get(name)

        def check() -> None:
            if name in self._over:
                raise EngineError("the trainer gave this update up")

        specs = [
            (weight, getattr(torch, dtype.removeprefix("torch.")), shape)
            for weight, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        if load_format == "flattened_bucket":
            size = sum(num_bytes(dtype, shape) for _, dtype, shape in specs)
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            group.broadcast(flat, check)
            return unflatten(flat, specs)
        received = []
        for weight, dtype, shape in specs:
            tensor = torch.empty(list(shape), dtype=dtype, device=self._device)
            group.broadcast(tensor, check)
            received.append((weight, tensor))
        return received

    def _get(self, name: str) -> BroadcastGroup:
        if name not in self._groups:
            raise EngineError(f"no weight group {name!r}; call /init_weights_update_group first")
        return self._groups[name]
