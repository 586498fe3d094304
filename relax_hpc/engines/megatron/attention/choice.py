"""The choice of the kernel that attends: one interface, three kernels."""

import importlib.util
import logging

import torch

from relax_hpc.engines.megatron.attention.packed_attention import Attend
from relax_hpc.errors import ConfigError

log = logging.getLogger(__name__)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The kernel called `actor.attention`, or the fastest that works here; logs which.

    Raises:
        ConfigError: the one asked for does not work here.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    works = {
        "cudnn": device.type == "cuda" and half and _importable("cudnn"),
        "varlen": device.type == "cuda" and half and _importable("torch.nn.attention.varlen"),
        "sdpa": True,
    }
    chosen = next(kernel for kernel, it_does in works.items() if it_does)
    if name != "auto":
        if not works[name]:
            raise ConfigError(
                f'actor.attention = "{name}": does not work with {dtype} on {device.type} here '
                f'(it needs {_NEEDS[name]}); use "auto", which is "{chosen}"'
            )
        chosen = name
    log.info("attention: %s", chosen)
    return _load(chosen)


_NEEDS = {
    "cudnn": "a GPU, 16-bit weights and the package nvidia-cudnn-frontend",
    "varlen": "a GPU, 16-bit weights and torch >= 2.10",
    "sdpa": "nothing",
}


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _load(name: str) -> Attend:
    if name == "cudnn":
        from relax_hpc.engines.megatron.attention.cudnn import CudnnAttention

        return CudnnAttention()
    if name == "varlen":
        from relax_hpc.engines.megatron.attention.varlen import attend

        return attend
    from relax_hpc.engines.megatron.attention.sdpa import attend as padded

    return padded
