"""PPO with a critic: it learns, though its critic is killed while it saves."""

import os
import signal
import time

import numpy as np
import pytest
from e2e_runs import assert_every_prompt_once, cli, events_of, submit, wait_until_over

from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS = 30, 16
SETTINGS = {
    "engines.rollout.count": 1, "engines.rollout.resources.nodes": 1, "schedule.num_steps": STEPS,
    "schedule.prompts_per_step": PROMPTS, "actor.save_every": 5, "actor.optimizer.lr": 3e-4,
    "actor.optimizer.warmup_steps": 2, "algorithm.epochs_per_step": 1, "critic.warmup_steps": 2,
    "bus.keep_steps": STEPS, "eval.heldout.every": 0, "eval.heldout.num_prompts": 256,
}  # fmt: skip


def kill_while_it_saves(run_dir, timeout_s):
    """Kills the critic when it writes a later checkpoint than its first; its step then, if seen."""
    folder, deadline = RunPaths(run_dir).critic_checkpoints, time.monotonic() + timeout_s
    pid = None
    while time.monotonic() < deadline:
        pid = pid or next((e["pid"] for e in events_of(run_dir, "critic", "start")), None)
        if pid and any(folder.glob("step_*")) and any(folder.glob(".step_*.draft")):
            os.kill(pid, signal.SIGKILL)
            return pid
        time.sleep(0.002 if pid else 0.2)
    raise AssertionError("it never saved")


def test_ppo_learns_though_the_critic_is_killed_while_it_saves(tiny, tmp_path):
    run_dir = submit("tiny/arithmetic_ppo", tiny, local=True, run_root=tmp_path, **SETTINGS).run_dir
    kill_while_it_saves(run_dir, 200)
    before = {each["step"]: each for each in events_of(run_dir, "critic", "critic_step")}
    after = wait_until_over(run_dir, 250)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert {c["name"] for c in after["components"]} == {"rollout", "actor", "critic"}
    # Nobody else was started again, and no trajectory is lost or used twice.
    starts = {role: len(events_of(run_dir, role, "start")) for role in ("rollout", "actor")}
    assert starts == {"rollout": 1, "actor": 1} and len(events_of(run_dir, "critic", "start")) == 2
    assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    assert after["progress"]["trajectories"]["trained_twice"] == 0
    # It went on from a checkpoint, and what it learned again has the numbers that it had.
    resumed = events_of(run_dir, "critic", "critic_resume")[-1]["step"]
    again = {each["step"]: each for each in events_of(run_dir, "critic", "critic_step")}
    assert sorted(again) == [*range(1, STEPS + 1)] and resumed % 5 == 0 and resumed > 0
    repeated = [step for step in before if step > resumed]
    for step in repeated:
        for name in ("loss", "grad_norm", "value/mean", "value/explained"):
            assert again[step][name] == before[step][name], (step, name)
    # Values are no staler than max_staleness = 1 lets tokens be.
    bus = RunPaths(run_dir).bus
    sides = [r for r in read_log(bus.log("critic-0")) if r.kind is RecordKind.SIDE]
    lags = [r.guid_min // PROMPTS - r.policy_version_min for r in sides]
    assert sides and {0, 1} >= set(lags)
    # Above all, it learns.
    scores = {
        when: np.sum(
            [
                (each["correct"], each["num_samples"])
                for each in events_of(run_dir, "rollout", "eval")
                if each["when"] == when
            ],
            axis=0,
        )
        for when in ("before", "after")
    }
    rates = {when: correct / count for when, (correct, count) in scores.items()}
    assert rates["after"] >= rates["before"] + 0.15, rates
