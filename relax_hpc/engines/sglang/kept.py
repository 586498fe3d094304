"""Arrays made once for all who ask, and kept up to a number of bytes."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Kept:
    """The tensors that were asked for last; of one event loop."""

    def __init__(self, most_bytes: int) -> None:
        """Keeps none yet.

        Args:
            most_bytes: of all that are kept; one that is larger is kept alone.
        """
        self._most_bytes, self._bytes = most_bytes, 0
        self._making = dict[bytes, asyncio.Task["Tensor"]]()
        self._kept = OrderedDict[bytes, "Tensor"]()

    async def of(self, key: bytes, make: Callable[[], "Tensor"]) -> "Tensor":
        """Returns the tensor of a key, which `make` makes in a thread unless it is kept or being
        made; what `make` raises goes to who gave it.

        Who waits for another's `make`, which may fail where the own one does not, goes on with the
        own. One who goes away before it is made takes it from nobody else.
        """
        while (other := self._making.get(key)) is not None:
            await asyncio.wait([other])
            if not other.cancelled() and other.exception() is None:
                return other.result()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._making[key] = asyncio.create_task(self._made(key, make))
        return await asyncio.shield(self._making[key])

    async def _made(self, key: bytes, make: Callable[[], "Tensor"]) -> "Tensor":
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
