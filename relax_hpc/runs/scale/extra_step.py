"""Runs an added engine's task: `python -m relax_hpc.runs.scale.extra_step RUN_DIR --number N
...`."""

import argparse
import signal
import socket
from pathlib import Path

from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.table import joining
from relax_hpc.runtime import hardware
from relax_hpc.runtime.files import permissions, storage
from relax_hpc.runtime.paths import RunPaths


def main() -> None:
    from relax_hpc.roles import task as roles

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--number", type=int, required=True, help="it is member extra-<number>")
    parser.add_argument("--slot", type=int, required=True, help="among the engines of its node")
    parser.add_argument("--attempt", required=True, help="job id and restart count")
    parser.add_argument("--gpus", type=int, default=0, help="of a node that were asked for")
    parser.add_argument("--transport", help="of weights, if not weights.transport")
    parser.add_argument("--on-node", type=int, default=0, help="engines that its node has room for")
    parser.add_argument("--cpus", type=int, default=0, help="of each, which takes them by itself")
    args = parser.parse_args()
    storage.settle()
    permissions.enter(RunPaths(args.run_dir))
    hardware.bind_cpus(args.slot, args.on_node, args.cpus)
    # Slurm announces the time limit to every step; those of the job itself act on it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    (component,) = joining()
    context = TaskContext(
        component=component,
        rank=args.number,
        size=1,
        local_rank=args.slot,
        attempt=args.attempt,
        start=1,
        node=socket.gethostname(),
        gpus=args.gpus,
        transport=args.transport,
    )
    roles.run(args.run_dir, context, "files")


if __name__ == "__main__":
    main()
