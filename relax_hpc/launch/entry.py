"""Runs a task: `python -m relax_hpc.launch.entry RUN_DIR COMPONENT --start N`.

The run directory says what it runs. Empty files report how it ended, see `paths.ComponentPaths`, to
the job's script, `status` and later attempts.
"""

import argparse
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from submitit import JobEnvironment

from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launch import requeue
from relax_hpc.roles.context import TaskContext
from relax_hpc.runtime import hardware, text
from relax_hpc.runtime.files import permissions, storage
from relax_hpc.runtime.files.records import write_text
from relax_hpc.runtime.files.scratch import use_private_folder
from relax_hpc.runtime.files.storage import delete, exists, patiently
from relax_hpc.runtime.paths import ComponentPaths, RunPaths

log = logging.getLogger(__name__)

TaskMain = Callable[[Path, TaskContext, str], None]
"""Takes the run directory, the task, and how the tasks of its component find each other."""


def main(run: TaskMain | None = None) -> None:
    """Runs this task until its role is done, unless its component has already finished.

    Args:
        run: replaces the role; for tests.
    """
    text.print_anything("utf-8")
    args = _parse()
    storage.settle()
    paths = RunPaths(args.run_dir)
    folder = paths.component(args.component)
    permissions.enter(paths, paths.submission, folder)
    job_id = JobEnvironment().job_id
    context = _context(args)
    if args.on_node and args.cpus:
        hardware.bind_cpus(context.local_rank, args.on_node, args.cpus)
    left = ComponentPaths(folder, job_id)
    if args.by_slurm:
        _open_logs(left, context.rank)
    if args.tasks is not None and args.apart_from is None and JobEnvironment().global_rank == 0:
        step = f"{job_id}.{os.environ['SLURM_STEP_ID']} {os.getpid()}\n"
        write_text(left.step, step)  # of several components: the job's script looks after it
    # All ranks or none: one that had finished must take part again when its peers start over. They
    # agree on which, since nobody removes a mark unless one is missing.
    peers = range(context.size)
    if args.apart_from is not None:
        peers = range(args.apart_from, args.apart_from + JobEnvironment().num_tasks)
    if all(exists(left.done(rank)) for rank in peers):
        log.info("finished before the job was requeued: nothing to do")
        return
    mine = left.done(context.rank)
    delete(mine)
    asks = args.by_slurm and context.rank == 0
    requeue.install(job_id, args.run_dir, asks=asks)
    if asks:
        context = replace(context, end=requeue.SlurmJobEnd(job_id, args.run_dir))
    take_job_network(os.environ)
    try:
        with use_private_folder(os.environ):
            (run or _role)(args.run_dir, context, args.bootstrap)
    except RelaxError as error:
        if error.is_final:
            patiently(mine, left.final(context.rank).touch)
        raise
    requeue.leave()
    patiently(mine, mine.touch)


def take_job_network(environment: MutableMapping[str, str]) -> None:
    """Makes this process and its children meet those of the job's other steps over Slingshot.

    With `--network=job_vni`, Slurm lists the step's own network (VNI), then the job's. Libfabric
    takes the first, which no other step can enter.
    """
    if "," in (listed := environment.get("SLINGSHOT_VNIS", "")):
        environment["SLINGSHOT_VNIS"] = listed.rpartition(",")[2]


def check_script(script: Path, run_dir: Path) -> None:
    """Refuses a job whose script starts modules that this installation does not have.

    Raises:
        ConfigError: another version wrote the script. A resumed run gets a new one.
    """
    if not exists(script):  # a test's, or `evaluate`'s
        return
    text = patiently(script, script.read_bytes).decode(errors="replace")
    for module in sorted(set(re.findall(r"-m (relax_hpc(?:\.\w+)+)", text))):
        if not _is_there(module):
            raise ConfigError(
                f"{script}: starts {module}, which this relax-hpc does not have, so another "
                f"version wrote it; end the run and start it again: relax-hpc resume {run_dir}"
            )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its folder
        return False


def _role(run_dir: Path, context: TaskContext, bootstrap: str) -> None:
    from relax_hpc.roles import task

    if context.rank == 0:
        script = f"{JobEnvironment().job_id}_submission.sh"
        check_script(RunPaths(run_dir).submission / script, run_dir)
    task.run(run_dir, context, bootstrap)


def _context(args: argparse.Namespace) -> TaskContext:
    """Identifies this task, from Slurm's or `local_step`'s variables by way of submitit."""
    environment = JobEnvironment()
    rank = environment.global_rank - args.first_rank + (args.apart_from or 0)
    return TaskContext(
        component=args.component,
        rank=rank,
        size=args.tasks or environment.num_tasks,
        # Slurm fills nodes in order of rank; in a step of its own a task is the first.
        local_rank=rank % args.on_node if args.on_node else environment.local_rank,
        attempt=requeue.attempt_of(environment.job_id),
        start=args.start,
        node=environment.hostname,
        gpus=args.gpus,
        step_from=args.apart_from or 0,
    )


def _open_logs(left: ComponentPaths, rank: int) -> None:
    """Sends further output to logs named by the rank in the component.

    Slurm knows only ranks of a step, and its versions count them differently.
    """
    for stream, path in ((sys.stdout, left.log(rank, "out")), (sys.stderr, left.log(rank, "err"))):
        with patiently(path, partial(path.open, "ab")) as file:
            os.dup2(file.fileno(), stream.fileno())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("component")
    parser.add_argument("--start", type=int, required=True, help="starts of the step, from 1")
    parser.add_argument("--bootstrap", default="files", help="how its tasks find each other")
    parser.add_argument("--gpus", type=int, default=0, help="of a node that were asked for")
    parser.add_argument("--by-slurm", action="store_true", help="opens logs, may ask for a requeue")
    parser.add_argument("--first-rank", type=int, default=0, help="of several in one step")
    parser.add_argument("--apart-from", type=int, help="rank of the first in this step of several")
    parser.add_argument("--tasks", type=int, help="of this component, if its step has others")
    parser.add_argument("--on-node", type=int, help="its tasks on a node, if in several steps")
    parser.add_argument("--cpus", type=int, help="of each of these, which takes them by itself")
    return parser.parse_args()


if __name__ == "__main__":
    main()
