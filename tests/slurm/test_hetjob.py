"""Heterogeneous jobs on a real Slurm: results, logs, faults, restarts, cancel, MPI worlds."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from submitit import JobEnvironment
from submitit.core.utils import FailedJobError

from relax_hpc.config.sections import Resources
from relax_hpc.launch import component, states
from relax_hpc.launch.jobs import Call
from relax_hpc.launch.placement import Component
from relax_hpc.launch.script import Job
from relax_hpc.launch.slurm import HetSlurmExecutor

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks do not import tests

pytestmark = pytest.mark.usefixtures("slurm_cluster")


def who_am_i(role):
    print(f"this is {role}")
    context = component.task_context(role)
    return context, JobEnvironment().num_nodes, os.environ.get("CUDA_VISIBLE_DEVICES")


def kill_yourself_at_the_first_start(role):
    context = component.task_context(role)
    if context.start == 1 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 0 and context.start == 1:
        time.sleep(3600)  # only its step can end it
    return context.start


def boom():
    raise ValueError("boom in a component")


def sleep_for_ever(started):
    Path(started).touch()
    time.sleep(3600)


def mpi_world():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, world.size, world.allgather(MPI.Get_processor_name())


def submit(folder, calls, **options):
    job = Job("toy", Path(folder), restart_delay_s=0.2, **options)
    return HetSlurmExecutor(folder).submit_het(calls, job)


def tasks(role, count, bootstrap="files", **resources):
    return Component(role, count, Resources(time="5", **resources), bootstrap)


def final_states(job, timeout_s=60):
    """The states of all components once Slurm has ended the whole job."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = states.query([job.job_id]).known
        active = ("PENDING", "RUNNING", "COMPLETING")
        if found and not any(state.state in active for state in found.values()):
            return {name: state.state for name, state in found.items()}
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.mark.parametrize("name", ["plain", "with space", "a'quote", "dollar$HOME; true"])
def test_components_have_their_own_tasks_nodes_gpus_results_and_logs(tmp_path, name):
    folder = tmp_path / name
    job = submit(folder, [
        Call(tasks("rollout", 2, nodes=2, gpus_per_node=1, mem="200M"), who_am_i, ("rollout",)),
        Call(tasks("actor", 2, gpus_per_node=2, mem="100M"), who_am_i, ("actor",)),
    ])  # fmt: skip
    rollout, actor = job.results()
    assert [(task.name, task.size, task.local_rank, nodes, gpus) for task, nodes, gpus in rollout] \
        == [("rollout-0", 2, 0, 2, "0"), ("rollout-1", 2, 0, 2, "0")]  # fmt: skip
    assert [(task.name, task.size, task.local_rank, nodes, gpus) for task, nodes, gpus in actor] \
        == [("actor-0", 2, 0, 1, "0,1"), ("actor-1", 2, 1, 1, "0,1")]  # fmt: skip
    assert {task.node for task, *_ in rollout}.isdisjoint({task.node for task, *_ in actor})
    assert actor[0][0].attempt == f"{job.job_id}.0"
    assert "this is actor" in job.components[1].stdout()
    assert "this is rollout" not in job.components[1].stdout()
    assert final_states(job) == {f"{job.job_id}+{k}": "COMPLETED" for k in (0, 1)}
    assert (folder / f"{job.job_id}_batch.log").exists()


def test_an_exception_reaches_the_submitter_and_ends_the_other_component(tmp_path):
    job = submit(tmp_path, [
        Call(tasks("rollout", 1), sleep_for_ever, (tmp_path / "started",)),
        Call(tasks("actor", 1), boom),
    ])  # fmt: skip
    error = job.components[1].exception()
    assert isinstance(error, FailedJobError) and "ValueError: boom in a component" in str(error)
    assert set(final_states(job).values()) == {"FAILED"}
    assert "giving up" in (tmp_path / f"{job.job_id}_batch.log").read_text()


def test_a_killed_task_has_its_step_started_again_in_place(tmp_path):
    job = submit(tmp_path, [
        Call(tasks("rollout", 2, nodes=2), kill_yourself_at_the_first_start, ("rollout",)),
        Call(tasks("actor", 1), who_am_i, ("actor",)),
    ], max_restarts=1)  # fmt: skip
    rollout, actor = job.results()
    assert rollout == [2, 2]
    assert actor[0][0].start == 1, "the other component was left alone"
    assert set(final_states(job).values()) == {"COMPLETED"}
    assert "rollout: start 1 ended" in (tmp_path / f"{job.job_id}_batch.log").read_text()


def test_cancel_ends_every_component_and_nothing_is_started_again(tmp_path):
    started = [tmp_path / "a", tmp_path / "b"]
    job = submit(tmp_path, [
        Call(tasks(role, 1), sleep_for_ever, (path,))
        for role, path in zip(("rollout", "actor"), started, strict=True)
    ], max_restarts=3)  # fmt: skip
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.cancel()
    assert set(final_states(job).values()) == {"CANCELLED"}
    assert "start 2" not in (tmp_path / f"{job.job_id}_batch.log").read_text()


def test_after_a_requeue_the_attempt_is_new_and_the_components_run_again(tmp_path):
    started = tmp_path / "started"
    job = submit(tmp_path, [
        Call(tasks("rollout", 1), sleep_at_the_first_attempt, (started,)),
        Call(tasks("actor", 1), who_am_i, ("actor",)),
    ])  # fmt: skip
    deadline = time.monotonic() + 60
    done = tmp_path / "c1" / f"{job.job_id}_0_result.pkl"  # a task that starts would die of it
    while not (started.exists() and done.exists()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.components[0].signal("USR2")  # what Slurm sends ahead of a time limit
    rollout, actor = job.results()
    assert rollout == [f"{job.job_id}.1"]
    assert actor[0][0].attempt == f"{job.job_id}.0", "it had finished and was not run again"


def test_one_component_alone_is_an_ordinary_job_that_is_restarted_and_requeued(tmp_path):
    killed = submit(tmp_path / "killed", [
        Call(tasks("actor", 2, nodes=2), kill_yourself_at_the_first_start, ("actor",)),
    ], max_restarts=1)  # fmt: skip
    started = tmp_path / "started"
    calls = [Call(tasks("actor", 1), sleep_at_the_first_attempt, (started,))]
    requeued = submit(tmp_path / "requeued", calls)
    assert killed.results() == [[2, 2]]
    assert final_states(killed) == {killed.job_id: "COMPLETED"}
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    requeued.components[0].signal("USR2")
    assert requeued.results() == [[f"{requeued.job_id}.1"]]
    assert final_states(requeued) == {requeued.job_id: "COMPLETED"}


def sleep_at_the_first_attempt(started):
    context = component.task_context("rollout")
    Path(started).touch()
    while context.attempt.endswith(".0"):
        time.sleep(0.1)
    return context.attempt


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
def test_each_component_is_one_mpi_world_of_its_own(tmp_path):
    plugins = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True)
    if "pmix" not in plugins.stdout + plugins.stderr:
        pytest.skip("Slurm's pmix plugin is not installed")
    job = submit(tmp_path, [
        Call(tasks("rollout", 2, "mpi", nodes=2, mpi="pmix"), mpi_world),
        Call(tasks("actor", 3, "mpi", mpi="pmix"), mpi_world),
    ])  # fmt: skip
    rollout, actor = job.results()
    assert [(rank, size) for rank, size, _ in rollout] == [(0, 2), (1, 2)]
    assert [(rank, size) for rank, size, _ in actor] == [(0, 3), (1, 3), (2, 3)]
    assert len(set(rollout[0][2])) == 2, "one world over two nodes"


def world_of_the_job(role):
    from mpi4py import MPI

    from relax_hpc.comm.world import MpiWorld

    context = component.task_context(role)
    if context.role == "actor" and context.rank == 0 and context.start == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world = MpiWorld.of_step(context.size, role)
    print(f"this is {context.name}")
    return context.name, context.start, MPI.COMM_WORLD.size, world.rank, world.allgather(role)


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
def test_components_can_be_one_mpi_world_which_is_restarted_whole(tmp_path):
    parts = {
        "rollout": tasks("rollout", 2, "mpi_job", nodes=2, mpi="pmix"),
        "actor": tasks("actor", 3, "mpi_job", mpi="pmix"),
    }
    calls = [Call(part, world_of_the_job, (role,)) for role, part in parts.items()]
    job = submit(tmp_path, calls, max_restarts=1)
    rollout, actor = job.results()
    assert rollout == [(f"rollout-{n}", 2, 5, n, ["rollout"] * 2) for n in range(2)]
    assert actor == [(f"actor-{n}", 2, 5, n, ["actor"] * 3) for n in range(3)]
    for folder, role, count in (("c0", "rollout", 2), ("c1", "actor", 3)):
        for rank in range(count):
            printed = (tmp_path / folder / f"{job.job_id}_{rank}_log.out").read_text()
            assert f"this is {role}-{rank}" in printed
    assert "rollout+actor: start 1 ended" in (tmp_path / f"{job.job_id}_batch.log").read_text()
