"""CUDA streams and events, which torch leaves untyped; None where there is no GPU."""

import time
from collections.abc import Callable

import torch

_POLL_S = 1e-4


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the current one."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def mark(stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> torch.cuda.Event:
    """An event that happens once `stream`, or the current one, has done what it was given."""
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def has_happened(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def wait_for(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    """Blocks until it has happened, as `synchronize` does; what `check` raises ends that."""
    while not has_happened(event):
        check()
        time.sleep(_POLL_S)
