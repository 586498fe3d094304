"""Long prefixes are computed once: siblings wait until the first of them has been through it.

Requests that reach an engine together each compute what they have in common, for it looks into its
cache when it begins with a request, and at that time nothing is there. With images that is most of
the work of a prompt group.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

Computed = Callable[[], None]
"""Says that an engine has been through the prefix; call it as often as you like."""


class Leads:
    """Prefixes that somebody is the first to ask for."""

    def __init__(self, is_known: Callable[[Hashable], bool]) -> None:
        """`is_known` tells whether an engine was asked for a prefix before."""
        self._is_known = is_known
        self._led: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, prefix: Hashable | None) -> AsyncIterator[Computed]:
        """Waits while somebody is the first; whoever is gives way with what this yields, at the
        end of the block at the latest. None is a prefix that nobody shares."""
        while (led := self._led.get(prefix)) is not None:
            await led.wait()
        if prefix is None or self._is_known(prefix):
            yield _nothing
            return
        mine = self._led[prefix] = asyncio.Event()

        def computed() -> None:
            if not mine.is_set():
                del self._led[prefix]
                mine.set()

        try:
            yield computed
        finally:
            computed()


def _nothing() -> None:
    pass
