"""Toys in place of roles, in real processes: a task runs this file instead of the entry.

`launch` and its sisters write down which toy each component is, and read what its tasks returned.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from submitit import JobEnvironment

from relax_hpc.errors import MismatchError
from relax_hpc.launch import entry
from relax_hpc.launch.script import Job, exit_code_file
from relax_hpc.runtime.paths import RunPaths

TASK = (str(Path(__file__).absolute()),)


def job(run_dir, **options):
    options = {"restart_delays_s": (0.1,), "has_summary": False, "task": TASK, **options}
    return Job("toy", Path(run_dir).absolute(), **options)


def write(run_dir, **calls):
    """Says what the tasks of each component do: the name of a toy, and its arguments."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    (Path(run_dir) / "toys.json").write_text(json.dumps(calls, default=str))


def results(run_dir, component, tasks):
    """Reads what the tasks of a component returned in the start that was the last."""
    paths = [RunPaths(Path(run_dir)).component(component) / f"{n}.json" for n in range(tasks)]
    return [json.loads(path.read_text()) for path in paths]


def exit_code(run_dir, job_id, timeout_s):
    """Waits for the script to end; what it left."""
    path = exit_code_file(RunPaths(Path(run_dir)).submission, job_id)
    until(lambda: path.exists() and path.read_text(), timeout_s)
    return int(path.read_text())


def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


def play(run_dir, context, _bootstrap):
    """Plays the toy of this task's component, and writes down what it returns."""
    written = [folder / "toys.json" for folder in (run_dir, run_dir.parent)]
    path = next(path for path in written if path.exists())
    name, *arguments = json.loads(path.read_text())[context.component]
    result = globals()[name](context, *arguments)
    path = RunPaths(run_dir).component(context.component) / f"{context.rank}.json"
    path.write_text(json.dumps(result))


def who_am_i(context):
    print(f"this is {context.name}")
    me = {**asdict(replace(context, end=None)), "name": context.name}
    nodes = JobEnvironment().num_nodes
    return {**me, "nodes": nodes, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}


def variables(context, *names):
    return {"attempt": context.attempt, **{name: os.environ.get(name) for name in names}}


def kill_yourself_at_the_first_start(context, *, others_wait=False):
    if context.start == 1 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if others_wait and context.rank == 0 and context.start == 1:
        time.sleep(3600)  # only its step can end it
    return context.start


def be_killed_while_others_wait(context):
    return kill_yourself_at_the_first_start(context, others_wait=True)


def be_killed_alone(context, folder):
    """Rank 1 is killed once all are there; the others go on until it is there again."""
    begun = Path(folder) / f"{context.rank}-{context.start}"
    begun.touch()
    if context.rank == 1 and context.start == 1:
        until(lambda: len(list(begun.parent.glob("*-1"))) == context.size, 60)
        os.kill(os.getpid(), signal.SIGKILL)
    until((begun.parent / "1-2").exists, 60)
    cpus = sorted(os.sched_getaffinity(0))
    return {**who_am_i(context), "start": context.start, "pid": os.getpid(), "cpus": cpus}


def outlive_srun(context, folder):
    """Kills the helper of its own srun, which would end it, and then srun."""
    if context.start == 1:
        asked = ["srun", f"--job-name={context.component}", str(folder)]
        own = [p for p in psutil.process_iter(["cmdline"]) if _has_all(p.info["cmdline"], asked)]
        for process in sorted(own, key=lambda each: each.ppid() not in [p.pid for p in own]):
            process.kill()
            time.sleep(0.5)
        time.sleep(120)
    return context.start


def _has_all(command, words):
    return all(any(each in word for word in command or ()) for each in words)


def take_your_time(context, seconds_per_rank):
    time.sleep(seconds_per_rank * context.rank)
    return context.start


def raise_until(context, start, message):
    if context.start < start:
        raise ValueError(message)
    return context.start


def wait_forever_with_a_child(context, pid_file):
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    Path(f"{pid_file}-{context.rank}").write_text(f"{os.getpid()} {child}", encoding="utf-8")
    time.sleep(3600)


def fail_for_good(context, mark):
    with Path(mark).open("a", encoding="utf-8") as file:
        file.write(f"{context.start} ")
    raise MismatchError("it will be no better")


def sleep_for_ever(_context, started):
    Path(started).touch()
    time.sleep(3600)


def sleep_at_the_first_attempt(context, started):
    Path(started).touch()
    while context.attempt.endswith(".0"):
        time.sleep(0.1)
    return context.attempt


def leave(_context, *paths):
    for path in map(Path, paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")


def mpi_world(_context):
    world_library()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, world.size, world.allgather(MPI.Get_processor_name())


def world_library():
    """Takes the MPI that fits Slurm's, as ranks of a run do."""
    from relax_hpc.runtime.comm.world import choose_library

    choose_library()


def world_of_the_job(context):
    world_library()
    from mpi4py import MPI

    from relax_hpc.runtime.comm.world import MpiWorld

    if context.component == "actor" and context.rank == 0 and context.start == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world = MpiWorld.of_step(context.size, context.component)
    print(f"this is {context.name}")
    all_ranks = world.allgather(context.component)
    return context.name, context.start, MPI.COMM_WORLD.size, world.rank, all_ranks


if __name__ == "__main__":
    sys.path.pop(0)  # tests are no package
    entry.main(play)
