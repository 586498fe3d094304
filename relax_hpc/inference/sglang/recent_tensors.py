"""Keeps the tensors that were asked for last, up to a number of bytes."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RecentTensors:
    """A cache of tensors, least recently used first out; for one event loop."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: size of the cache; a larger tensor is kept alone."""
        self._most_bytes, self._bytes = most_bytes, 0
        self._making = dict[bytes, asyncio.Task["Tensor"]]()
        self._kept = OrderedDict[bytes, "Tensor"]()

    async def of(self, key: bytes, make: Callable[[], "Tensor"]) -> "Tensor":
        """Returns the tensor of a key; `make` builds it in a thread unless it is cached or being
        built. Errors of `make` go to its own caller.

        If another caller's `make` fails, this one calls its own. A caller that leaves early does
        not disturb the others.
        """
        while (other := self._making.get(key)) is not None:
            await asyncio.wait([other])
            if not other.cancelled() and other.exception() is None:
                return other.result()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._making[key] = asyncio.create_task(self._make(key, make))
        return await asyncio.shield(self._making[key])

    async def _make(self, key: bytes, make: Callable[[], "Tensor"]) -> "Tensor":
        try:
            made = await asyncio.to_thread(make)
        finally:
            del self._making[key]
        self._kept[key] = made
        self._bytes += made.nbytes
        while self._bytes > self._most_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return made
