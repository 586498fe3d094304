"""What publishing needs of an engine's client."""

from collections.abc import Sequence
from typing import Protocol

from relax_hpc.comm.orders import Order


class Receiver(Protocol):
    """Every method but `health` raises EngineError."""

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
    def receive_weights(self, orders: Sequence[Order], *, version: int) -> None:
        """Of engines that take a version in one call: an order for each of its ranks."""
        ...

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
        last: bool,
    ) -> None:
        """Of engines that take a call per bucket."""
        ...
