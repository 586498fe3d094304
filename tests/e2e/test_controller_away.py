"""Slurm's controller is away for a while, and a task dies meanwhile: the run completes."""

import subprocess
import time
from pathlib import Path

import e2e_runs as e2e
import psutil
import pytest
from cluster import LOCAL_SLURM

from relax_hpc.runs import verdict

STEPS, PROMPTS, SIBLINGS = 40, 8, 4


def local_slurm(variables, *words):
    folder = Path(variables["SLURM_CONF"]).parents[1]
    subprocess.run([LOCAL_SLURM, *words, "--dir", folder], check=True, timeout=60)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "away_s", [pytest.param(20, marks=pytest.mark.long), pytest.param(300, marks=pytest.mark.soak)]
)
def test_a_task_that_dies_while_the_controller_is_away_comes_back_and_the_run_completes(
    tiny, tmp_path, slurm_cluster, away_s
):
    small = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(tmp_path), "actor.save_every": 4,
        "launch.max_restarts": 0,  # one that is counted would end the run
        "engines.rollout.count": 1, "engines.rollout.resources.nodes": 1,
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=False, **small).run_dir
    e2e.wait_until(run_dir, e2e.has_done(2), 200)
    local_slurm(slurm_cluster, "ctld-kill")
    try:
        back = time.monotonic() + away_s
        e2e.kill(run_dir, "rollout")
        e2e.wait_for(lambda: (told := verdict.read(run_dir)) and told.what == "waiting", 240)
        assert "Slurm's controller does not answer" in verdict.read(run_dir).words
        assert len(e2e.events_of(run_dir, "rollout", "start")) == 1
        actor = e2e.events_of(run_dir, "actor", "start")[-1]["pid"]
        e2e.wait_for(lambda: time.monotonic() >= back, away_s + 60)
        assert psutil.pid_exists(actor), "the trainer goes on"
    finally:
        local_slurm(slurm_cluster, "ctld-start")
    e2e.wait_for(lambda: len(e2e.events_of(run_dir, "rollout", "start")) == 2, 200)
    e2e.hurry(tmp_path)
    e2e.wait_for(lambda: e2e.is_over(e2e.status(run_dir)), 300)
    after = e2e.status(run_dir)
    assert after["state"] == "COMPLETED", e2e.cli("logs", run_dir)[-4000:]
    assert len(e2e.events_of(run_dir, "actor", "start")) == 1
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    assert after["progress"]["trajectories"]["trained_twice"] == 0
    assert after["progress"]["heldout_after"] is not None


@pytest.mark.long
def test_a_run_that_slurm_requeues_unannounced_says_so_and_goes_on(tiny, tmp_path, slurm_cluster):
    small = e2e.sized(tmp_path, 12, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(tmp_path), "actor.save_every": 1,
        "engines.rollout.count": 1, "engines.rollout.resources.nodes": 1,
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=False, **small).run_dir
    e2e.wait_until(run_dir, e2e.has_done(2), 200)
    subprocess.run(["scontrol", "requeue", e2e.status(run_dir)["job_id"]], check=True)
    e2e.wait_for(lambda: (told := verdict.read(run_dir)) and told.what == "requeued", 60)
    assert "requeued by Slurm, for the time number 1" in e2e.cli("status", run_dir)
    e2e.hurry(tmp_path)
    e2e.wait_until_over(run_dir, 400)
    assert e2e.status(run_dir)["state"] == "COMPLETED"
    attempts = {event["attempt"] for event in e2e.events_of(run_dir, "actor", "start")}
    assert len(attempts) == 2
    e2e.assert_every_prompt_once(run_dir, 12, PROMPTS)
