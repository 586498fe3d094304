"""CPUs of tasks that share a node in steps of their own: each takes its part, or nobody any."""

import os
import subprocess
import sys

import pytest

from relax_hpc.comm import cpus
from relax_hpc.fleet.scaling import Extra
from relax_hpc.job_file import validate
from relax_hpc.launch import entry
from relax_hpc.paths import RunPaths
from relax_hpc.scale import steps

MAIN = """
import os, subprocess, sys, threading, time
from relax_hpc.comm import cpus

os.sched_setaffinity(0, {*map(int, sys.argv[1:])})
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
cpus.take(1, 2, 1)
threads = os.listdir("/proc/self/task")
print(*[sorted(os.sched_getaffinity(int(thread))) for thread in threads], flush=True)
subprocess.run(["grep", "Cpus_allowed_list", "/proc/self/status"])
"""


@pytest.fixture
def bound(monkeypatch):
    """Says which CPUs Slurm lets a task use; what it binds itself to, if anything."""

    def take(allowed, *arguments):
        found = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, own: found.append(own))
        cpus.take(*arguments)
        return found[0] if found else None

    return take


def test_tasks_of_a_node_take_parts_of_what_all_of_them_see(bound, monkeypatch):
    monkeypatch.setattr(cpus, "in_order_of_cores", sorted)
    seen = {2, 3, 5, 7, 11, 13}
    assert [bound(seen, rank, 2, 3) for rank in range(2)] == [[2, 3, 5], [7, 11, 13]]
    assert [bound(seen, rank, 3, 2) for rank in range(3)] == [[2, 3], [5, 7], [11, 13]]


def test_where_slurm_binds_nobody_or_has_dealt_already_nothing_is_bound(bound):
    assert bound(set(range(64)), 0, 2, 8) is None
    assert bound({0, 1, 2}, 0, 2, 3) is None


def test_threads_of_one_core_are_of_one_task(tmp_path):
    """Four cores of two threads, whose numbers are as far apart as they often are."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    found = cpus.in_order_of_cores({*range(8)}, tmp_path)
    assert found == [0, 4, 1, 5, 2, 6, 3, 7]
    assert cpus.in_order_of_cores({3, 9, 12}, tmp_path) == [3, 9, 12], "nobody says"
    (tmp_path / "cpu5" / "topology" / "thread_siblings_list").write_text("1-2\n")
    assert cpus.in_order_of_cores({5, 2}, tmp_path) == [5, 2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_every_thread_of_a_task_and_what_it_starts_is_bound():
    first, second = cpus.in_order_of_cores(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-c", MAIN, str(first), str(second)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"[{second}] [{second}]\nCpus_allowed_list:\t{second}\n"


@pytest.mark.parametrize(
    ("per_task", "srun", "own"),
    [(1, [], 4), (2, [], 2), (1, ["--cpu-bind=none"], None)],
)
def test_added_engines_of_one_node_see_all_of_it_and_take_parts(
    per_task, srun, own, tmp_path, monkeypatch
):
    """Two nodes with two engines each and 4 CPUs a task, and two that are idle."""
    resources = {"nodes": 2, "max_nodes": 4, "cpus_per_task": 4, "srun": srun}
    pool = {"count": 4, "engines_per_task": per_task, "resources": resources}
    run = {"name": "run", "run_root": str(tmp_path), "model": {"path": "m"}}
    rest = {"prompts": {"train": "t"}, "schedule": {"num_steps": 1}}
    config = validate({**run, **rest, "engines": {"rollout": pool}}, source="test")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "n[1-4]")
    names = subprocess.CompletedProcess([], 0, "n1\nn2\nn3\nn4\n", "")
    monkeypatch.setattr(steps, "output_of", lambda _: names)
    started = []
    monkeypatch.setattr(
        steps.subprocess, "Popen", lambda line, **_: started.append(line[-1]) or FakeProcess()
    )
    scaled = steps.SlurmSteps(config, RunPaths(tmp_path / "run"), "7", "7.0")
    scaled.start(Extra("extra-1", 1, scaled.nodes[0], 1, "PENDING", 0.0))
    words = started[0].split()
    assert {"--overlap", "--nodelist=n3", f"--cpus-per-task={8 // per_task}"} <= {*words}
    told = [] if own is None else ["--on-node", "2", "--cpus", str(own)]
    assert words[words.index("--gpus") + 2 :] == told


class FakeProcess:
    pid = os.getpid()


def test_a_task_in_a_step_of_its_own_knows_its_place_on_the_node(monkeypatch):
    """Slurm says rank 0 of one; the script which rank that is, and how many are on a node."""
    told = ["entry", "/run", "rollout", "--start", "2", "--apart-from", "5", "--tasks", "8"]
    monkeypatch.setattr("sys.argv", [*told, "--on-node", "4", "--cpus", "3"])
    for name, value in {
        "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    task = entry._context(entry._parse())
    assert (task.rank, task.size, task.local_rank, task.step_from, task.start) == (5, 8, 1, 5, 2)
