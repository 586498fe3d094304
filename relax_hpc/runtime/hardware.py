"""Checks the GPUs and binds the CPUs that a task requested."""

import ctypes
import os
import socket
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from relax_hpc.errors import ConfigError

_SYSTEM = Path("/sys/devices/system/cpu")


def count_gpus() -> int:
    """Counts the GPUs that the driver shows this process, without the slow import of torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    found = ctypes.c_int(0)
    is_there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    return found.value if is_there else 0


def check_gpus(asked: int, found: int, finder: str) -> None:
    """Checks that this task has the GPUs that its component requested.

    Torch and SGLang would silently compute on CPUs instead.

    Args:
        asked: GPUs per node.
        found: GPUs on this node.
        finder: who found them, for the error.

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


def bind_cpus(local_rank: int, tasks: int, count: int) -> None:
    """Binds this process and its children to its share of the CPUs that it may use.

    Slurm gives tasks of one step disjoint CPUs, but overlapping steps the same ones. Nothing is
    bound if the allowed CPUs are not exactly those of all tasks.

    Args:
        local_rank: among the tasks of the component on this node.
        tasks: of the component on this node.
        count: CPUs per task.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) != tasks * count:
        return
    own = sort_by_core(allowed)[local_rank * count : (local_rank + 1) * count]
    for thread in Path("/proc/self/task").iterdir():  # a library may have made some
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), own)


def sort_by_core(cpus: Set[int], system: Path = _SYSTEM) -> list[int]:
    """Sorts CPUs so that the hardware threads of one core are adjacent.

    Args:
        cpus: the kernel's numbers; those of one core are often far apart.
        system: sysfs folder with the topology.
    """

    def core(cpu: int) -> int:
        path = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        with suppress(OSError, ValueError):  # "0,64" or "0-1"
            return int(path.read_text(encoding="utf-8").replace("-", ",").split(",")[0])
        return cpu

    return sorted(cpus, key=lambda cpu: (core(cpu), cpu))
