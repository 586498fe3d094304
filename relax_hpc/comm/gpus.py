"""The GPUs that a task asked for, and those that are there: one that lacks some computes nothing.

Torch and SGLang would compute on CPUs instead, without a word.
"""

import ctypes
import os
import socket

from relax_hpc.errors import ConfigError


def count() -> int:
    """Returns how many GPUs the driver shows this process; torch takes seconds to be imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    found = ctypes.c_int(0)
    is_there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    return found.value if is_there else 0


def check(asked: int, found: int, finder: str) -> None:
    """Checks that this task has the GPUs that its component asked for.

    Args:
        asked: for so many on each of its nodes.
        found: how many there are on this one.
        finder: who found them.

    Raises:
        ConfigError: some are missing.
    """
    dealt = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    is_bound = 0 < found == len(dealt)  # by `srun --gpu-bind`, to some of them
    if found < asked and not is_bound:
        raise ConfigError(
            f"resources.gpus_per_node: on node {socket.gethostname()} {asked} GPUs are asked for, "
            f"and {finder} finds {found}; look with nvidia-smi there, leave the node out "
            "(resources.exclude), or compute on CPUs with gpus_per_node = 0"
        )
