"""Seconds of what a GPU, or this process, does."""

import time
from collections.abc import Callable

import torch


class Clock:
    """Times acts on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def timed(
        self, act: Callable[[], object], repeats: int, *, warm_up: bool = True
    ) -> list[float]:
        """Returns the seconds of each repeat; `warm_up` does it once before."""
        if warm_up:
            act()
        found = []
        for _ in range(repeats):
            begin = self._now()
            act()
            found.append(self._now() - begin)
        return found

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()
