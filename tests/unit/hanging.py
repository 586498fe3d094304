"""A task that hangs in one way or another: `python hanging.py RUN_DIR RANK HOW`."""

import asyncio
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from relax_hpc.roles.engine.host import while_kept
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.watchdog import watch

LEAST_S = 0.5


def hold_the_interpreter():
    """Sleeps in C and lets no other thread run Python meanwhile."""
    sleep = ctypes.PyDLL(None).sleep
    while True:  # a signal ends one sleep
        sleep(60)


def in_a_collective():
    """Waits where torch waits, as far as a stack tells."""
    place = {}
    made = "def all_reduce():\n    import time\n    time.sleep(60)\n"
    exec(compile(made, "/lib/torch/distributed/distributed_c10d.py", "exec"), place)
    place["all_reduce"]()


def in_a_wait():
    """Waits in a function that is not of Python, as that of torch's `Work` is not."""
    work = SimpleNamespace(wait=ctypes.CDLL(None).sleep)
    while True:  # a signal ends one sleep
        work.wait(60)


def stand_still():
    """Holds up the event loop of a task that keeps engines."""

    async def loop():
        await asyncio.sleep(LEAST_S / 5)
        time.sleep(60)

    asyncio.run(while_kept([], loop()))


def go_on():
    for _ in range(20):
        time.sleep(LEAST_S / 5)
        heartbeat.beat()


def compute():
    """Has threads that run, each at another depth of calls all the time."""

    def deep(levels):
        return levels and deep(levels - 1)

    def run():
        while True:
            deep(50)

    for _ in range(2):
        threading.Thread(target=run, daemon=True).start()
    run()


def sleep():
    time.sleep(60)


def main():
    run_dir, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    is_one_world, least_s = "world" in sys.argv, LEAST_S * (3 if "patient" in sys.argv else 1)
    with watch(
        run_dir, "toy", rank, "toy-1.0-1", "n1",
        is_one_world=is_one_world, least_s=least_s, most_s=2 * least_s,
    ):  # fmt: skip
        heartbeat.at_step(7)
        with heartbeat.phase("work", waits=how == "waits"):
            (run_dir / f"{rank}.pid").write_text(str(os.getpid()))
            if "threads" in sys.argv:  # any of them may be given a signal of the process
                for _ in range(20):
                    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
            if how == "waits":
                time.sleep(4 * least_s)
            else:
                globals()[how]()
    (run_dir / f"{rank}.done").touch()


if __name__ == "__main__":
    main()
