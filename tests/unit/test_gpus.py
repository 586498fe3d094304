"""GPUs that were asked for and are not there; CPUs of tasks that share a node."""

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from job_trees import job_of

from relax_hpc.errors import ConfigError
from relax_hpc.inference.embedded import server
from relax_hpc.inference.process import start_engine
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.launch import entry, preflight
from relax_hpc.launch.placement import Component
from relax_hpc.runs.scale import scaler
from relax_hpc.runs.scale.records import Extra
from relax_hpc.runtime import hardware
from relax_hpc.runtime.comm.torch_group import own_device
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources


@pytest.fixture(autouse=True)
def no_word(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("asked", "visible", "found", "lacks"),
    [
        (4, None, 4, False),
        (4, "0,1,2,3", 3, True),
        (4, "2", 1, False),  # srun --gpu-bind: one of four for each task
        (4, "2", 0, True),
        (2, "0,-1", 1, True),  # local_step, of a machine with one
    ],
)
def test_who_asked_for_gpus_has_them_or_does_not_begin(monkeypatch, asked, visible, found, lacks):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = f"{asked} GPUs are asked for, and torch finds {found};"
    with pytest.raises(ConfigError, match=said) if lacks else nullcontext():
        hardware.check_gpus(asked, found, "torch")


def test_a_rank_and_engines_that_lack_gpus_do_not_compute(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    threads = torch.get_num_threads()
    assert own_device(0, asked=0) == torch.device("cpu")
    torch.set_num_threads(threads)
    with pytest.raises(ConfigError, match=r"4 GPUs are asked for, and torch \S+ finds 0"):
        own_device(0, asked=4)
    with pytest.raises(ConfigError, match="4 GPUs are asked for"):
        server.serve(tmp_path, "127.0.0.1", {"num_threads": threads, "gpus": 4})
    told = {"host": "127.0.0.1", "token": "t", "log_path": tmp_path / "log", "least_gpus": 4}
    with pytest.raises(ConfigError, match="4 GPUs are asked for, and the driver finds 0"):
        start_engine(EngineSpec("sglang", tmp_path), **told)


def test_all_components_of_a_run_without_slurm_have_their_gpus_on_this_machine(monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda: 3)
    rollout = Component("rollout", 2, Resources(gpus_per_node=2))
    actor = dataclasses.replace(rollout, name="actor")
    with pytest.raises(ConfigError, match=r"4 GPUs of this machine, .* it shows 3"):
        preflight.check_gpus([rollout, actor])
    preflight.check_gpus([rollout, dataclasses.replace(actor, on="rollout")])


MAIN = """
import os, subprocess, sys, threading, time
from relax_hpc.runtime import hardware

os.sched_setaffinity(0, {*map(int, sys.argv[1:])})
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
hardware.bind_cpus(1, 2, 1)
threads = os.listdir("/proc/self/task")
print(*[sorted(os.sched_getaffinity(int(thread))) for thread in threads], flush=True)
subprocess.run(["grep", "Cpus_allowed_list", "/proc/self/status"])
"""


def test_threads_of_one_core_are_of_one_task(tmp_path):
    """Four cores of two threads, whose numbers are as far apart as they often are."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    found = hardware.sort_by_core({*range(8)}, tmp_path)
    assert found == [0, 4, 1, 5, 2, 6, 3, 7]
    assert hardware.sort_by_core({3, 9, 12}, tmp_path) == [3, 9, 12], "nobody says"
    (tmp_path / "cpu5" / "topology" / "thread_siblings_list").write_text("1-2\n")
    assert hardware.sort_by_core({5, 2}, tmp_path) == [5, 2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_every_thread_of_a_task_and_what_it_starts_is_bound():
    first, second = hardware.sort_by_core(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-c", MAIN, str(first), str(second)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"[{second}] [{second}]\nCpus_allowed_list:\t{second}\n"


@pytest.mark.parametrize(
    ("per_task", "srun", "own"), [(1, [], 4), (2, [], 2), (1, ["--cpu-bind=none"], None)]
)
def test_added_engines_of_one_node_see_all_of_it_and_take_parts(
    per_task, srun, own, tmp_path, monkeypatch
):
    """Two nodes with two engines each and 4 CPUs a task, and two that are idle."""
    resources = {"nodes": 2, "max_nodes": 4, "cpus_per_task": 4, "srun": srun}
    pool = {"count": 4, "engines_per_task": per_task, "resources": resources}
    config = job_of(run_root=str(tmp_path), engines__rollout=pool)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "n[1-4]")
    names = subprocess.CompletedProcess([], 0, "n1\nn2\nn3\nn4\n", "")
    monkeypatch.setattr(scaler, "output_of", lambda _: names)
    started = []
    monkeypatch.setattr(
        scaler.subprocess, "Popen", lambda line, **_: started.append(line[-1]) or FakeProcess()
    )
    scaled = scaler.SlurmSteps(config, RunPaths(tmp_path / "run"), "7", "7.0")
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
    monkeypatch.setattr("sys.argv", [*told, "--on-node", "4", "--gpus", "2"])
    for name, value in {
        "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    task = entry._context(entry._parse())
    assert (task.rank, task.size, task.local_rank, task.step_from, task.start) == (5, 8, 1, 5, 2)
    assert task.gpus == 2
