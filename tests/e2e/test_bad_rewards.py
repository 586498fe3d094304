"""A run with a reward of somebody's that always fails."""

import re

import pytest
from e2e_runs import cli, events_of, sized, submit, wait_until_over

REWARD = """
def broken(response, answer):
    return float(response == answer or " " in response) or 1 / 0  # as check asks
"""

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


def test_a_run_whose_reward_fails_too_often_ends_and_names_samples(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    settings = sized(tmp_path, 10, 8, 8, 32) | {
        "launch.profile": "local", "schedule.max_staleness": 0, "actor.save_every": 100,
        "reward.name": f"{tmp_path}/mine.py:broken",
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    now = wait_until_over(run_dir, 120)
    assert now["state"] == "FAILED"
    assert "RewardError: reward.advanced.most_errors = 0.05: the reward failed" in now["reason"]
    assert re.search(
        r"by guid/sibling, \d+ x ZeroDivisionError: .* \(mine.py:\d+\), first in \d+/\d;",
        now["reason"],
    )
    assert len(events_of(run_dir, "rollout", "start")) == 1, "it is not started again"
    assert now["progress"]["steps_done"] <= 3
    said = cli("status", run_dir)
    assert re.search("to go on +relax-hpc submit JOB --set name=NEW", said)
    assert "reward errors" in said and "(first: ZeroDivisionError: " in said
