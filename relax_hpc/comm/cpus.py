"""The CPUs of a task that shares those of its node with tasks of other Slurm steps.

Slurm binds the tasks of one step to CPUs of their own. Steps that overlap it binds to the same.
"""

import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")


def take(local_rank: int, tasks: int, count: int) -> None:
    """Binds this process, and what it starts, to its part of the CPUs that it may use.

    Nothing is bound where these are not exactly those of all tasks: either Slurm binds nobody, or
    it has dealt otherwise.

    Args:
        local_rank: among the tasks of the component on this node.
        tasks: of it on this node.
        count: CPUs that each of them asked for.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) != tasks * count:
        return
    own = in_order_of_cores(allowed)[local_rank * count : (local_rank + 1) * count]
    for thread in Path("/proc/self/task").iterdir():  # a library may have made some
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), own)


def in_order_of_cores(cpus: Set[int], system: Path = _SYSTEM) -> list[int]:
    """Returns CPUs in an order in which hardware threads of one core follow each other.

    Args:
        cpus: numbers that the kernel gives them; those of one core are often far apart.
        system: where the kernel says which are of one core.
    """

    def core(cpu: int) -> int:
        path = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        with suppress(OSError, ValueError):  # "0,64" or "0-1"
            return int(path.read_text().replace("-", ",").split(",")[0])
        return cpu

    return sorted(cpus, key=lambda cpu: (core(cpu), cpu))
