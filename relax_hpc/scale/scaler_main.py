"""The process of the scaler: `python -m relax_hpc.scale.scaler_main RUN_DIR ...`.

The job script starts it beside the components, and again should it die. So it is in the job's
allocation, and ends with the job and not with anybody's login.
"""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from relax_hpc import job_file, permissions, storage
from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.run import RunConfig
from relax_hpc.launch import requeue
from relax_hpc.paths import RunPaths
from relax_hpc.scale.scaler import Scaler
from relax_hpc.scale.steps import LocalSteps, SlurmSteps

_TICK_S = 0.5
_END_S = 8.0
"""Seconds for extra engines to stop when the run ends."""


def main() -> None:
    args = _parse()
    storage.settle()
    paths = RunPaths(args.run_dir)
    permissions.enter(paths)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,  # the log of the job script
        format="%(asctime)s scaler: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config = job_file.read_resolved(paths.config)
    assert isinstance(config, RunConfig)
    storage.settle(config.launch.peer_timeout_s, reserve=paths.reserve)
    attempt = requeue.attempt_of(args.job_id)
    steps = (
        LocalSteps(config, paths, args.controller, attempt)
        if args.local
        else SlurmSteps(config, paths, args.job_id, attempt)
    )
    scaler, controller = Scaler(config, paths, steps, attempt), ProcessId.of(args.controller)
    while not stop.wait(_TICK_S) and controller.find():
        scaler.tick()
    scaler.end(_END_S)
    if not stop.is_set():
        sys.exit(f"scaler: process {args.controller}, the job script, is not there any more")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--controller", type=int, required=True, help="end when this process ends")
    parser.add_argument("--local", action="store_true", help="there is no Slurm")
    return parser.parse_args()


if __name__ == "__main__":
    main()
