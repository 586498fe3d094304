"""Rollout on a queue whose jobs are preempted again and again: training goes on beside it."""

import subprocess
import time

import e2e_runs as e2e
import pytest

pytestmark = pytest.mark.long

# Five steps may be sampled ahead, so a policy lasts five at the least: 1.2 steps a second at most,
# of a run that has to last through three preemptions.
STEPS, PROMPTS, SECONDS_A_REWARD = 160, 8, 4
TIMES, EVERY_S = 3, 30


def preempt():
    """Takes the node of whoever is in the way, for a moment; returns once it has it."""
    asked = ["srun", "--partition=main", "--nodes=1", "--cpus-per-task=8", "--mem=100M", "sleep"]
    subprocess.run([*asked, "1"], check=True, timeout=120, capture_output=True)


def test_rollout_that_is_preempted_every_30_s_loses_nothing_and_training_goes_on(
    tiny, tmp_path, two_nodes
):
    settings = e2e.sized(tmp_path, STEPS, PROMPTS, 4, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(tmp_path, SECONDS_A_REWARD),
        "launch.layout": "separate", "launch.advanced.idle_s": 600, "weights.transport": "files",
        "engines.rollout.resources.cpus_per_task": 8, "actor.resources.cpus_per_task": 8,
        "engines.rollout.resources.partition": "low", "actor.resources.partition": "main",
        "schedule.max_staleness": 4, "rollout.advanced.groups_per_shard": 2,
        "actor.save_every": 1000,
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=False, **settings).run_dir

    def steps():
        return [event["step"] for event in e2e.events_of(run_dir, "actor", "step")]

    def attempts():
        return len(e2e.events_of(run_dir, "rollout", "start"))

    e2e.wait_for(steps, 100)
    for number in range(1, TIMES + 1):
        begun, before = time.monotonic(), len(steps())
        preempt()
        assert len(steps()) < STEPS, "it is preempted while there is something to do"
        e2e.wait_for(lambda number=number: attempts() > number, 120)
        e2e.wait_for(lambda before=before: len(steps()) > before, 100)
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - begun)) * (number < TIMES))
    e2e.hurry(tmp_path)
    now = e2e.wait_until_over(run_dir, 200)
    assert now["state"] == "COMPLETED", e2e.cli("logs", run_dir)[-4000:]
    assert steps() == [*range(1, STEPS + 1)], "none is trained again"
    assert len(e2e.events_of(run_dir, "actor", "start")) == 1 and attempts() == TIMES + 1
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    assert now["progress"]["trajectories"]["trained_twice"] == 0
    assert now["progress"]["redone"]["tokens_sampled_again"] == 0
    assert now["progress"]["max_staleness_seen"] <= 4
