"""Requests that follow each other at engines, and how many tokens came when."""

import asyncio
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

import numpy as np

from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.response import Sampling
from relax_hpc.errors import EngineError

_PROMPT_TOKENS = 64
_LOOK_S = 0.05


class SteadyLoad:
    """A constant number of requests in flight at every engine, from a thread of its own. A context
    manager: the load runs for the length of the block."""

    def __init__(
        self, engines: Sequence[tuple[str, str]], in_flight: int, *, vocabulary: int, length: int
    ) -> None:
        """Starts nothing.

        Args:
            engines: URL and token of each.
            in_flight: requests per engine.
            vocabulary: prompts are random ids below it.
            length: tokens of every response but the first ones.
        """
        self._engines, self._in_flight = engines, in_flight
        self._vocabulary, self._length = vocabulary, length
        self.failed = 0
        """Requests that ended in an error."""
        self._seen: list[tuple[float, int]] = []
        self._seeds = itertools.count()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def tokens_per_s(self, begin: float, end: float) -> float:
        """Tokens per second of all engines between two points of `time.time()`."""
        return tokens_per_s(list(self._seen), begin, end)

    async def _run(self) -> None:
        clients = [GenerationClient(url, token) for url, token in self._engines]

        async def ask(client: GenerationClient, length: int) -> None:
            sampling = Sampling(1.0, length, ignore_eos=True)
            while not self._ended.is_set():
                seed = next(self._seeds)
                random = np.random.default_rng(seed)
                prompt = random.integers(0, self._vocabulary, _PROMPT_TOKENS).tolist()
                try:
                    await client.sample(prompt, seed, sampling, version=0)
                    sampling = sampling._replace(max_new_tokens=self._length)
                except EngineError:
                    self.failed += 1
                    await asyncio.sleep(1)

        async def look() -> None:
            while not self._ended.is_set():
                sampled = sum(client.counts.num_tokens for client in clients)
                self._seen.append((time.time(), sampled))
                await asyncio.sleep(_LOOK_S)

        # First responses end one after the other: else all would grow old together, and the
        # engine would be quick, then slow, then busy with prompts, whatever else happens.
        lengths = [-(-self._length * i // self._in_flight) for i in range(1, self._in_flight + 1)]
        await asyncio.gather(look(), *(ask(c, length) for c in clients for length in lengths))
        for client in clients:
            await client.aclose()


def tokens_per_s(seen: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Tokens per second from counts at some times; 0 if they do not reach so far."""
    times = [at for at, _ in seen]
    first, last = bisect_left(times, begin), bisect_left(times, end)
    if last >= len(seen) or first >= last:
        return 0.0
    return (seen[last][1] - seen[first][1]) / (seen[last][0] - seen[first][0])
