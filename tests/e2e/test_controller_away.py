"""Slurm's controller is away for a while, and a task dies meanwhile: the run completes."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from cluster import LOCAL_SLURM
from e2e_runs import (
    cli,
    events_of,
    every_prompt_once,
    has_done,
    hurry,
    is_over,
    planned,
    status,
    submit,
    unhurried,
    wait_for,
    wait_until,
)

from relax_hpc.runs import verdict

STEPS, PROMPTS, SIBLINGS = 40, 8, 4


def local_slurm(variables, *words):
    folder = Path(variables["SLURM_CONF"]).parents[1]
    subprocess.run([LOCAL_SLURM, *words, "--dir", folder], check=True, timeout=60)


def kill(run_dir, role):
    """Kills the only task of a component."""
    pid = events_of(run_dir, role, "start")[-1]["pid"]
    psutil.Process(pid).send_signal(signal.SIGKILL)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "away_s",
    [pytest.param(20, marks=pytest.mark.long), pytest.param(300, marks=pytest.mark.soak)],
)
def test_a_task_that_dies_while_the_controller_is_away_comes_back_and_the_run_completes(
    tiny, tmp_path, slurm_cluster, away_s
):
    small = {
        "run_root": tmp_path, "launch.profile": "local", "reward.name": unhurried(tmp_path),
        "schedule.num_steps": STEPS, "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS, "actor.save_every": 4,
        "launch.max_restarts": 0,  # one that is counted would end the run
        "engines.rollout.count": 1, "engines.rollout.resources.nodes": 1,
        "eval.heldout.every": 0, "eval.heldout.num_prompts": 8,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **small).run_dir
    try:
        wait_until(run_dir, has_done(2), 200)
        local_slurm(slurm_cluster, "ctld-kill")
        try:
            back = time.monotonic() + away_s
            kill(run_dir, "rollout")
            wait_for(lambda: (told := verdict.read(run_dir)) and told.what == "waiting", 240)
            assert "Slurm's controller does not answer" in verdict.read(run_dir).words
            assert len(events_of(run_dir, "rollout", "start")) == 1
            actor = events_of(run_dir, "actor", "start")[-1]["pid"]
            wait_for(lambda: time.monotonic() >= back, away_s + 60)
            assert psutil.pid_exists(actor), "the trainer goes on"
        finally:
            local_slurm(slurm_cluster, "ctld-start")
        wait_for(lambda: len(events_of(run_dir, "rollout", "start")) == 2, 200)
        hurry(tmp_path)
        wait_for(lambda: is_over(status(run_dir)), 300)
        after = status(run_dir)
        assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
        assert len(events_of(run_dir, "actor", "start")) == 1
        assert planned(run_dir) == every_prompt_once(STEPS, PROMPTS)
        assert after["progress"]["trajectories"]["trained_twice"] == 0
        assert after["progress"]["heldout_after"] is not None
    finally:
        cli("cancel", run_dir)


@pytest.mark.long
def test_a_run_that_slurm_requeues_unannounced_says_so_and_goes_on(tiny, tmp_path, slurm_cluster):
    small = {
        "run_root": tmp_path, "launch.profile": "local", "reward.name": unhurried(tmp_path),
        "schedule.num_steps": 12, "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS, "actor.save_every": 1,
        "engines.rollout.count": 1, "engines.rollout.resources.nodes": 1,
        "eval.heldout.every": 0, "eval.heldout.num_prompts": 8,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **small).run_dir
    try:
        wait_until(run_dir, has_done(2), 200)
        subprocess.run(["scontrol", "requeue", status(run_dir)["job_id"]], check=True)
        wait_for(lambda: (told := verdict.read(run_dir)) and told.what == "requeued", 60)
        assert "requeued by Slurm, for the time number 1" in cli("status", run_dir)
        hurry(tmp_path)
        wait_until(run_dir, is_over, 400)
        assert status(run_dir)["state"] == "COMPLETED"
        attempts = {event["attempt"] for event in events_of(run_dir, "actor", "start")}
        assert len(attempts) == 2
        assert planned(run_dir) == every_prompt_once(12, PROMPTS)
    finally:
        cli("cancel", run_dir)
