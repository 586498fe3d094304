"""Tasks that run side by side, of which the first error ends all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that raises the first of their errors itself: who reads it is told nothing
    by a group of errors, and whether it is final is said by the error alone."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first  # noqa: B904 -- its own cause stays
