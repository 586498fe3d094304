"""Runs with a reward of somebody's that hangs, dies and leaks now and then, or always fails."""

import re

import numpy as np
import pytest
from e2e_runs import cli, events_of, every_prompt_once, is_over, planned, sized, submit, wait_until

from relax_hpc.bus.reader import Reader
from relax_hpc.bus.tools import inventory
from relax_hpc.runtime.paths import RunPaths

REWARD = """
import hashlib, os, time
from relax_hpc.environments.rewards.functions.boxed_number import score as boxed_number
from relax_hpc import Score

kept = []

def score(response: str, answer: str, *, faults: bool = True):
    chance = hashlib.sha256(f"{response} {answer}".encode()).digest()[1] / 256
    if response == answer or chance >= 0.06:  # as check asks
        return boxed_number(response, answer)
    if not faults:
        return Score(0.0, error="masked")
    if chance < 0.02:
        time.sleep(1000)
    if chance < 0.04:
        os._exit(1)
    while True:
        kept.append(bytes(1 << 24))

def broken(response, answer):
    return float(response == answer or " " in response) or 1 / 0  # as check asks, too
"""
STEPS, PROMPTS, SIBLINGS, HELDOUT = 10, 8, 8, 32

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


@pytest.fixture
def start(tiny, tmp_path):
    """Submits a run to Slurm, with a reward of that file."""
    (tmp_path / "mine.py").write_text(REWARD)

    def submitted(name, function, **settings):
        return submit(
            "demo", tiny, local=False,
            **sized(tmp_path, STEPS, PROMPTS, SIBLINGS, HELDOUT) | {
                "name": name, "launch.profile": "local", "schedule.max_staleness": 0,
                "rollout.advanced.groups_per_shard": PROMPTS, "actor.optimizer.lr": 2e-4,
                "actor.optimizer.warmup_steps": 2, "actor.save_every": 100,
                "bus.keep_steps": STEPS, "reward.name": f"{tmp_path}/mine.py:{function}",
                "reward.deadline_s": 0.3, "reward.advanced.memory_gib": 0.5,
            } | settings,
        ).run_dir  # fmt: skip

    return submitted


def rows_of(run_dir):
    """(guid, sibling) -> reward and whether it failed, of all that was trained on."""
    paths, found = RunPaths(run_dir).bus, {}
    for step in range(1, STEPS + 1):
        for record in inventory.of_steps(paths, step, step):
            index = Reader(paths).index(record)
            places = zip(index.guid.tolist(), index.sibling.tolist(), strict=True)
            values = zip(index.rewards.tolist(), index.reward_error.tolist(), strict=True)
            found |= dict(zip(places, values, strict=True))
    return found


def test_a_reward_that_hangs_dies_and_leaks_is_as_one_that_masks_those_samples(start):
    masked = {"reward.on_error": "mask", "reward.advanced.most_errors": 0.3}
    runs = [
        start("faults", "score", **masked),
        start("masks", "score", **masked, **{"reward.args.faults": "false"}),
    ]
    curves, rows = [], []
    for run_dir in runs:
        now = wait_until(run_dir, is_over, 300)
        assert (now["state"], now["progress"]["steps_done"]) == ("COMPLETED", STEPS)
        assert planned(run_dir) == every_prompt_once(STEPS, PROMPTS)
        steps = events_of(run_dir, "actor", "step")
        curves.append([step["reward/mean"] for step in steps])
        rows.append(found := rows_of(run_dir))
        failed = sum(error for _, error in found.values())
        assert len(found) == STEPS * PROMPTS * SIBLINGS
        assert 0.02 < failed / len(found) < 0.15
        counted = now["progress"]["reward_errors"]
        assert (counted["samples"], counted["errors"]) == (len(found), failed)
        assert now["progress"]["heldout_reward_errors"] is None or (
            now["progress"]["heldout_reward_errors"]["samples"] == 2 * HELDOUT
        )
        in_steps = sum(step["reward/errors"] for step in steps) * PROMPTS * SIBLINGS
        assert in_steps == pytest.approx(failed)
    first = [[values[guid, n] for guid in range(PROMPTS) for n in range(SIBLINGS)]
             for values in rows]  # fmt: skip
    assert first[0] == first[1], "what policy 0 said is scored, or failed, in the same way"
    one, other = map(np.array, curves)
    assert abs(one - other).mean() < 0.01, "they were equal in every bit when this was written"


def test_a_run_whose_reward_fails_too_often_ends_and_names_samples(start):
    run_dir = start("broken", "broken")
    now = wait_until_it_fails(run_dir)
    assert (
        "RewardError: reward.advanced.most_errors = 0.05: the reward failed for 2" in now["reason"]
    )
    assert re.search(
        r"by guid/sibling, \d+ x ZeroDivisionError: .* \(mine.py:\d+\), first in \d+/\d;",
        now["reason"],
    )
    assert len(events_of(run_dir, "rollout", "start")) == 1, "it is not started again"
    assert now["progress"]["steps_done"] <= 3
    said = cli("status", run_dir)
    assert "to go on      relax-hpc submit JOB --set name=NEW" in said
    assert "reward errors" in said and "(first: ZeroDivisionError: " in said


def wait_until_it_fails(run_dir):
    now = {"state": ""}

    def failed(status):
        now.update(status)
        return is_over(status)

    wait_until(run_dir, failed, 120)
    assert now["state"] == "FAILED"
    return now
