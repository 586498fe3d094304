"""The communicator of weights comes about by MPI: for engines of the job, restarted and added."""

import json
import signal

import psutil
import pytest
import submitit
from e2e_runs import (
    REPOSITORY,
    cli,
    events_of,
    has_done,
    hurry,
    is_over,
    sized,
    status,
    submit,
    unhurried,
    wait_until,
)

import relax_hpc
from relax_hpc.runtime.paths import RunPaths

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]

STEPS = 60


def invited(run_dir):
    """Engine -> how it was invited into the group that there is."""
    group = json.loads(RunPaths(run_dir).rendezvous("weights").read_text())
    return {member["id"]: member["invited_by"] for member in group["members"]}


def task_of(run_dir, component):
    """The first task of a component."""
    words = ["relax_hpc.launch.entry", f"{run_dir} {component} "]
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or ())
        if all(word in line for word in words) and "srun" not in line:
            return process
    raise AssertionError(f"no task of {component}")


def doors_of(run_dir):
    return [each for each in psutil.process_iter(["cmdline"])
            if "relax_hpc.runtime.comm.mpi_door" in (each.info["cmdline"] or ())]  # fmt: skip


@pytest.mark.parametrize("bootstrap", ["auto", "files"])
def test_engines_join_by_it_again_whoever_dies_and_an_added_one_does(tiny, tmp_path, bootstrap):
    settings = sized(tmp_path, STEPS, 8, 4, 8) | {
        "launch.profile": "local",
        "launch.max_restarts": 9,
        "launch.advanced.bootstrap": bootstrap,
        "engines.rollout.resources.max_nodes": 2,
        "reward.name": unhurried(tmp_path),
        "actor.save_every": 2,
        "weights.advanced.checksum_every": 1,
    }
    way = "mpi" if bootstrap == "auto" else "files"
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    wait_until(run_dir, has_done(2), 300)
    assert invited(run_dir) == {"rollout-0": way}
    assert cli("scale", "out", run_dir, "--engines", "2", "--wait").endswith("done\n")
    assert invited(run_dir) == {"rollout-0": way, "extra-1": way}
    for component in ("rollout", "actor"):
        steps = wait_until(run_dir, has_done(1), 60)["progress"]["steps_done"]
        task_of(run_dir, component).send_signal(signal.SIGKILL)
        wait_until(run_dir, has_done(steps + 4), 300)
        assert invited(run_dir) == {"rollout-0": way, "extra-1": way}
    hurry(tmp_path)
    after = wait_until(run_dir, is_over, 400)
    assert after["state"] == "COMPLETED"
    checks = events_of(run_dir, "actor", "verify")
    assert len(checks) > STEPS / 2 and all(each["equal"] for each in checks)
    assert after["progress"]["trajectories"]["trained_twice"] == 0
    starts = {(e["role"], e["start"]) for e in events_of(run_dir, event="start")}
    assert starts == {("rollout", 1), ("rollout", 2), ("actor", 1), ("actor", 2), ("extra", 1)}
    assert not doors_of(run_dir)


def test_in_one_world_of_open_mpi_they_join_over_that_and_an_added_one_by_http(tiny, tmp_path):
    settings = sized(tmp_path, STEPS, 8, 4, 8) | {
        "launch.profile": "local",
        "launch.advanced.bootstrap": "mpi_job",
        "engines.rollout.resources.max_nodes": 2,
        "reward.name": unhurried(tmp_path),
        "weights.advanced.checksum_every": 1,
    }
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    wait_until(run_dir, has_done(2), 300)
    assert invited(run_dir) == {"rollout-0": "mpi"}
    assert not doors_of(run_dir), "threads of the ranks"
    assert cli("scale", "out", run_dir, "--engines", "2", "--wait").endswith("done\n")
    assert invited(run_dir) == {"rollout-0": "mpi", "extra-1": "http"}
    hurry(tmp_path)
    assert wait_until(run_dir, is_over, 400)["state"] == "COMPLETED"
    checks = events_of(run_dir, "actor", "verify")
    assert len(checks) > STEPS / 2 and all(each["equal"] for each in checks)


def test_a_run_is_driven_through_submitit_alone(tiny, tmp_path):
    executor = submitit.AutoExecutor(tmp_path / "folder", cluster="hetslurm")
    settings = sized(tmp_path, 3, 8, 4, 8) | {
        "name": "driven",
        "launch.profile": "local",
        "model.path": str(tiny / "model"),
        "prompts.train": f"{tiny}/train.jsonl[0:512]",
        "eval.heldout.path": str(tiny / "heldout.jsonl"),
    }
    job = executor.submit(relax_hpc.submit, REPOSITORY / "jobs" / "demo.toml", **settings)
    assert [job.task(k).paths.folder.name for k in range(job.num_tasks)] == ["rollout", "actor"]
    assert job.results() == ["COMPLETED", "COMPLETED"] and job.state == "COMPLETED"
    assert status(tmp_path / "driven")["progress"]["steps_done"] == 3
