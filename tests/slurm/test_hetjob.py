"""Heterogeneous jobs on a real Slurm: results, logs, faults, restarts, cancel, MPI worlds."""

import os
import re
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
import toys
from toys import exit_code, results, until

from relax_hpc.launch import states
from relax_hpc.launch.placement import Component
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.runs import verdict
from relax_hpc.runtime.paths import ComponentPaths, RunPaths
from relax_hpc.sections import Resources

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


def submit(run_dir, components, calls, **options):
    toys.write(run_dir, **calls)
    job = toys.job(run_dir, restart_delays_s=(0.2,), **options)
    return HetSlurmExecutor(job.folder).submit_het(job, components)


def tasks(role, count, bootstrap="files", **resources):
    return Component(role, count, Resources(time="5", **resources), bootstrap)


def left(run_dir, job, component):
    return ComponentPaths(RunPaths(run_dir).component(component), job.job_id)


def script_log(run_dir, job):
    return (RunPaths(run_dir).submission / f"{job.job_id}_batch.log").read_text()


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


def announce_the_time_limit(component_id):
    """Sends what Slurm sends, to one component: a signal to "<leader>+<k>" would reach them all."""
    command = ["squeue", "-h", "--states=all", "-o", "%i %A", "-j", component_id]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = answer.stdout.splitlines()
    own = dict(line.split() for line in lines)[component_id]
    subprocess.run(["scancel", "--signal", "USR2", own], check=True)


@pytest.mark.parametrize("name", ["a'quote", "dollar$HOME; true"])
def test_components_have_their_own_tasks_nodes_gpus_results_and_logs(tmp_path, name):
    run_dir = tmp_path / name
    components = [
        tasks("rollout", 2, nodes=2, gpus_per_node=1, mem="200M"),
        tasks("actor", 2, gpus_per_node=2, mem="100M"),
    ]
    job = submit(run_dir, components, {"rollout": ["who_am_i"], "actor": ["who_am_i"]})
    assert final_states(job) == {f"{job.job_id}+{k}": "COMPLETED" for k in (0, 1)}
    rollout, actor = results(run_dir, "rollout", 2), results(run_dir, "actor", 2)
    told = ("name", "size", "local_rank", "nodes", "gpus")
    assert [tuple(task[word] for word in told) for task in rollout] == [
        ("rollout-0", 2, 0, 2, "0"), ("rollout-1", 2, 0, 2, "0")]  # fmt: skip
    assert [tuple(task[word] for word in told) for task in actor] == [
        ("actor-0", 2, 0, 1, "0,1"), ("actor-1", 2, 1, 1, "0,1")]  # fmt: skip
    assert {task["node"] for task in rollout}.isdisjoint({task["node"] for task in actor})
    assert actor[0]["attempt"] == f"{job.job_id}.0"
    for role in ("rollout", "actor"):
        logs = [left(run_dir, job, role).log(rank, "out").read_text() for rank in range(2)]
        assert logs == [f"this is {role}-0\n", f"this is {role}-1\n"]
        there = left(run_dir, job, role)
        assert all(not there.log(node, "out").read_text() for node in there.nodes())
    assert (RunPaths(run_dir).submission / f"{job.job_id}_batch.log").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_an_interpreter_that_does_not_start_is_named(tmp_path, count):
    """Before tasks have logs of their own: of several it is the node that is known."""
    no_python = tmp_path / "no-python"
    calls = {"rollout": ["sleep_for_ever", tmp_path / "started"], "actor": ["who_am_i"]}
    components = [tasks("rollout", 1), tasks("actor", count, python=str(no_python))]
    job = submit(tmp_path, components, calls)
    assert set(final_states(job).values()) == {"FAILED"}
    folder = RunPaths(tmp_path).component("actor")
    actor = LaunchedComponent("actor", f"{job.job_id}+1", count, folder)
    launched = LaunchRecord("slurm", job.job_id, (actor,), 0.0, None)
    said, who = verdict.last_words(launched, ["actor"])
    assert str(no_python) in said and "No such file" in said
    assert re.fullmatch("actor-0" if count == 1 else r"actor on n\d", who)


def test_each_of_two_tasks_on_a_node_is_a_step_and_the_one_that_is_killed_starts_again_alone(
    tmp_path,
):
    """All see all GPUs of their node; which are whose follows from the place on the node."""
    for_two, are_told = divmod(len(os.sched_getaffinity(0)), 2)
    asked = {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": min(for_two, 4) or 1}
    rollout = replace(tasks("rollout", 4, **asked), is_apart=True)
    calls = {"rollout": ["be_killed_alone", tmp_path], "actor": ["who_am_i"]}
    job = submit(tmp_path, [rollout, tasks("actor", 1)], calls, max_restarts=1)
    assert set(final_states(job).values()) == {"COMPLETED"}
    found = results(tmp_path, "rollout", 4)
    told = ("name", "size", "local_rank", "gpus", "start", "step_from")
    assert [tuple(task[word] for word in told) for task in found] == [
        ("rollout-0", 4, 0, "0,1", 1, 0), ("rollout-1", 4, 1, "0,1", 2, 1),
        ("rollout-2", 4, 0, "0,1", 1, 2), ("rollout-3", 4, 1, "0,1", 1, 3),
    ]  # fmt: skip
    nodes = [task["node"] for task in found]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    if not are_told and for_two <= 4:  # as where Slurm binds a step to the CPUs of its job
        assert {*found[0]["cpus"]}.isdisjoint(found[1]["cpus"])
        assert found[0]["cpus"] == found[2]["cpus"]
    log = script_log(tmp_path, job)
    assert log.count("rollout: start 1 ended with exit code 137") == 1
    assert log.count("rollout: start 1 ended with exit code 0") == 3
    logs = [left(tmp_path, job, "rollout").log(rank, "out") for rank in range(4)]
    assert all(f"this is rollout-{rank}" in path.read_text() for rank, path in enumerate(logs))


def test_a_step_whose_srun_and_helper_were_killed_is_ended_and_starts_again(tmp_path):
    calls = {"rollout": ["who_am_i"], "actor": ["outlive_srun", tmp_path]}
    whole = {"cpus_per_task": 8}  # of a node: no step can begin beside one that is left
    roles = [tasks("rollout", 1, **whole), tasks("actor", 1, **whole)]
    job = submit(tmp_path, roles, calls, max_restarts=1)
    assert set(final_states(job).values()) == {"COMPLETED"}
    assert results(tmp_path, "actor", 1) == [2]
    log = script_log(tmp_path, job)
    assert "actor: start 1 ended with exit code 137" in log and "actor: ending step" in log


def test_after_a_requeue_the_attempt_is_new_and_the_components_run_again(tmp_path):
    started = tmp_path / "started"
    calls = {"rollout": ["sleep_at_the_first_attempt", started], "actor": ["who_am_i"]}
    job = submit(tmp_path, [tasks("rollout", 1), tasks("actor", 1)], calls)
    done = left(tmp_path, job, "actor").done(0)
    until(lambda: started.exists() and done.exists(), 60)
    announce_the_time_limit(job.component_ids[0])
    until(left(tmp_path, job, "rollout").done(0).exists, 120)
    assert set(final_states(job).values()) == {"COMPLETED"}
    assert results(tmp_path, "rollout", 1) == [f"{job.job_id}.1"]
    [actor] = results(tmp_path, "actor", 1)
    assert actor["attempt"] == f"{job.job_id}.0", "it had finished and was not run again"


def test_one_component_alone_is_an_ordinary_job_that_is_restarted_and_requeued(tmp_path):
    calls = {"actor": ["be_killed_while_others_wait"]}
    alone = [tasks("actor", 2, nodes=2)]
    killed = submit(tmp_path / "killed", alone, calls, max_restarts=1)
    started = tmp_path / "started"
    calls = {"actor": ["sleep_at_the_first_attempt", started]}
    requeued = submit(tmp_path / "requeued", [tasks("actor", 1)], calls)
    assert final_states(killed) == {killed.job_id: "COMPLETED"}
    assert results(tmp_path / "killed", "actor", 2) == [2, 2]
    until(started.exists, 60)
    announce_the_time_limit(*requeued.component_ids)
    until(left(tmp_path / "requeued", requeued, "actor").done(0).exists, 120)
    assert results(tmp_path / "requeued", "actor", 1) == [f"{requeued.job_id}.1"]
    assert final_states(requeued) == {requeued.job_id: "COMPLETED"}


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
def test_components_can_be_one_mpi_world_which_is_restarted_whole(tmp_path):
    components = [
        tasks("rollout", 2, "mpi_job", nodes=2, mpi="pmix"),
        tasks("actor", 3, "mpi_job", mpi="pmix"),
    ]
    calls = {each.name: ["world_of_the_job"] for each in components}
    job = submit(tmp_path, components, calls, max_restarts=1)
    assert exit_code(tmp_path, job.job_id, 120) == 0
    for role, count in (("rollout", 2), ("actor", 3)):
        worlds = results(tmp_path, role, count)
        assert worlds == [[f"{role}-{n}", 2, 5, n, [role] * count] for n in range(count)]
        for rank in range(count):
            printed = left(tmp_path, job, role).log(rank, "out").read_text()
            assert f"this is {role}-{rank}" in printed
    assert "rollout+actor: start 1 ended" in script_log(tmp_path, job)
