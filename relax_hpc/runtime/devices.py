"""Hides the differences between GPU and CPU: copies, streams and events."""

import time
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compile_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function at its first call with a first argument on a GPU."""

    @cache
    def made() -> Callable[P, R]:
        return torch.compile(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return made()(*args, **kwargs) if first.is_cuda else function(*args, **kwargs)

    return call


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device, without waiting for the GPU's queued work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_POLL_S = 1e-4


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def mark(stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> torch.cuda.Event:
    """Records an event on `stream`, or the current one."""
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def has_happened(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def wait_for(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    """Blocks until the event has happened, as `synchronize` does; an error of `check` ends the
    wait."""
    while not has_happened(event):
        check()
        time.sleep(_POLL_S)


def hush() -> None:
    """Silences Megatron-core's import-time notes on optional packages, once per module."""
    for package in ("Apex", "Transformer Engine"):
        warnings.filterwarnings(
            "ignore", rf"{package} .*not installed", UserWarning, module="megatron"
        )
