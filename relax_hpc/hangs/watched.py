"""The task's side of its watchdog."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from relax_hpc import heartbeat
from relax_hpc.hangs import recorder, watchdog
from relax_hpc.hangs.process import tell_no_stacks, tell_stacks
from relax_hpc.hangs.watchdog import Orders
from relax_hpc.paths import RunPaths
from relax_hpc.scratch import scratch_folder


@contextmanager
def watched(
    run_dir: Path,
    component: str,
    rank: int,
    start_id: str,
    node: str,
    *,
    is_one_world: bool,
    least_s: float,
    most_s: float,
) -> Iterator[None]:
    """Has a watchdog beside this process for the length of the block.

    What both share has no name: it is gone with them.

    Args:
        run_dir: of the run.
        component: of the task.
        rank: within the component.
        start_id: the same for all tasks of one start of the component.
        node: where it runs.
        is_one_world: the ranks of the component wait for each other.
        least_s: limit of a phase that is known to be short, and of a stop.
        most_s: limit of every phase.
    """
    shared, stacks = os.memfd_create("heartbeat"), os.memfd_create("stacks")
    os.ftruncate(shared, heartbeat.BYTES)
    orders = Orders(
        str(run_dir), component, rank, start_id, node, is_one_world, os.getpid(), shared, stacks,
        min(least_s, most_s),
    )  # fmt: skip
    with mmap.mmap(shared, heartbeat.BYTES) as memory, ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("hangs"))
        if is_one_world:
            dump = RunPaths(run_dir).collectives(start_id)
            pipe = stack.enter_context(recorder.settled(os.environ, folder, dump))
            orders = replace(orders, recorder=pipe)
        heartbeat.begin(memory, least_s=least_s, most_s=most_s)
        tell_stacks(stacks)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", watchdog.__name__, json.dumps(asdict(orders))],
            stdin=subprocess.DEVNULL,
            pass_fds=(shared, stacks),
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()
            tell_no_stacks()
            heartbeat.end()
            os.close(shared)
            os.close(stacks)
