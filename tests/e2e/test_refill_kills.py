"""Two groups of five without spread: every batch is full, and kills anywhere change no batch."""

import os
import random
import signal

import pytest
from e2e_runs import (
    cli,
    events_of,
    is_over,
    next_that_teach,
    planned,
    submit,
    wait_until,
)

STEPS, PROMPTS, SIBLINGS, KILLS = 40, 8, 4, 20

REWARD = """
def score(group):
    flat = sum(map(ord, str(group[0].prompt))) % 5 < 2
    return [1.0 if flat else float(number % 2) for number, _ in enumerate(group)]
"""
"""What it says follows from the prompt, so that which groups are skipped does, too."""


def submit_refilled(tiny, folder, *, local, steps, **settings):
    folder.mkdir()
    (folder / "flat.py").write_text(REWARD)
    small = {
        "run_root": folder, "schedule.num_steps": steps, "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS, "rollout.groups_per_shard": 4,
        "reward.name": f"{folder}/flat.py:score", "algorithm.groups.name": "refill",
        "actor.save_every": 4, "eval.heldout.every": 0, "eval.heldout.num_prompts": 16,
        "launch.max_restarts": 2 * KILLS,
    }  # fmt: skip
    return submit("demo", tiny, local=local, **small | settings).run_dir


def check(run_dir, steps):
    """Every batch is the next groups that are not skipped; returns the plan."""
    found = planned(run_dir)
    assert found == next_that_teach(run_dir, steps, PROMPTS)
    last = found[-1][1][-1]
    assert 0.25 < (last + 1 - steps * PROMPTS) / last < 0.55  # are skipped
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("slurm_cluster")
def test_kills_of_trainer_and_rollout_at_twenty_points_change_no_batch(tiny, tmp_path):
    whole = submit_refilled(
        tiny, tmp_path / "whole", local=False, steps=STEPS, **{"launch.profile": "local"}
    )
    wait_until(whole, is_over, 900)
    expected = check(whole, STEPS)
    run_dir = submit_refilled(
        tiny, tmp_path / "killed", local=False, steps=STEPS, **{"launch.profile": "local"}
    )
    dice, starts = random.Random(0), {"actor": 0, "rollout": 0}
    try:
        for number in range(KILLS):
            role = ("actor", "rollout")[number % 2]
            starts[role] += 1

            def is_up(_, role=role):
                return len(events_of(run_dir, role, "start")) >= starts[role]

            wait_until(run_dir, is_up, 200)
            begun = len(events_of(run_dir, "actor", "step"))
            more = dice.choice([0, 0, 1, 2])
            wait_until(
                run_dir,
                lambda _, n=begun + more: len(events_of(run_dir, "actor", "step")) >= n,
                200,
            )
            os.kill(events_of(run_dir, role, "start")[-1]["pid"], signal.SIGKILL)
        assert wait_until(run_dir, is_over, 900)["state"] == "COMPLETED"
    finally:
        cli("cancel", run_dir)
    assert check(run_dir, STEPS) == expected
