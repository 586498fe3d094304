"""Where a step's seconds go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """`with timers("train"): ...` adds to `time/train`, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        return " ".join(f"{k.removeprefix('time/')} {v:.1f}" for k, v in self.seconds.items())
