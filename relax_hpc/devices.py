"""Functions that do on a GPU otherwise than on a CPU, so that nothing else asks which it is."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles it when its first argument is on a GPU, at the first such call."""

    @cache
    def made() -> Callable[P, R]:
        return torch.compile(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return made()(*args, **kwargs) if first.is_cuda else function(*args, **kwargs)

    return call


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device; to a GPU without waiting for what it computes."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
