"""Slurm announces the end of a job: the step that was trained is saved, and none is redone."""

import signal
import subprocess

import e2e_runs as e2e
import pytest

from relax_hpc.launch import record
from relax_hpc.runs import verdict

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]

STEPS, PROMPTS, SIBLINGS = 16, 8, 4
MOST_IN_FLIGHT = 2 * PROMPTS * SIBLINGS
"""Responses that may be under way, by a staleness of 1."""


def submit_slow(tiny, folder, seconds=0.3, **settings):
    """A run whose own checkpoints are far apart: what is redone would be many steps."""
    small = e2e.sized(folder, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(folder, seconds),
        "rollout.advanced.groups_per_shard": 2, "actor.save_every": 1000,
    }  # fmt: skip
    e2e.hurry(folder)  # `submit` tries the reward
    run_dir = e2e.submit("demo", tiny, local=False, **small | settings).run_dir
    (folder / "slowly").touch()
    return run_dir


def announce(run_dir, number=signal.SIGUSR2):
    """Sends what Slurm sends to every task of every component."""
    for each in record.read(run_dir).components:
        subprocess.run(["scancel", f"--signal={number.name}", each.job_id], check=True)


def is_requeued(run_dir, times):
    return lambda: len({e["attempt"] for e in e2e.events_of(run_dir, "actor", "start")}) > times


def test_no_step_is_trained_again_after_an_end_that_was_announced_even_twice(tiny, tmp_path):
    run_dir = submit_slow(tiny, tmp_path)
    e2e.wait_until(run_dir, e2e.has_done(3), 150)
    announce(run_dir)
    announce(run_dir, signal.SIGUSR1)  # a second one, of another kind
    e2e.wait_for(is_requeued(run_dir, 1), 120)
    said = verdict.read(run_dir).words
    [saved] = e2e.events_of(run_dir, "actor", "checkpoint")
    assert f"with step {saved['step']} saved: requeued, for the time number 1" in said
    announce(run_dir)  # while it starts
    e2e.wait_for(is_requeued(run_dir, 2), 120)
    e2e.hurry(tmp_path)
    e2e.wait_until_over(run_dir, 250)
    first, *_ = [event["step"] for event in e2e.events_of(run_dir, "actor", "resume")]
    assert first == saved["step"]
    steps = [event["step"] for event in e2e.events_of(run_dir, "actor", "step")]
    assert steps == [*range(1, STEPS + 1)]
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    assert e2e.cli("status", run_dir, "--json").count('"trained_twice": 0') == 1
    kept = sum(event["num_tokens"] for event in e2e.events_of(run_dir, "rollout", "unfinished"))
    redone = e2e.status(run_dir)["progress"]["redone"]
    # None where all that was allowed for had been answered when the end was announced.
    assert redone.pop("tokens_continued") >= kept
    # The last one of each response under way at an end, of which there were two. These have
    # eight tokens at most; of responses of a hundred it is 1 % of what was under way.
    assert redone.pop("tokens_lost") <= 2 * MOST_IN_FLIGHT
    assert set(redone.values()) == {0}
    ends = e2e.status(run_dir)["progress"]["announced_ends"]
    assert len(ends) == 2 and all(0 < end["drained_s"] <= 60 for end in ends)


def test_a_critic_learns_no_step_again_either(tiny, tmp_path):
    small = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(tmp_path),
        "rollout.advanced.groups_per_shard": 2, "engines.rollout.count": 1,
        "engines.rollout.resources.nodes": 1, "actor.save_every": 1000,
    }  # fmt: skip
    run_dir = e2e.submit("tiny/arithmetic_ppo", tiny, local=False, **small).run_dir
    e2e.wait_until(run_dir, e2e.has_done(3), 200)
    announce(run_dir)
    e2e.wait_for(is_requeued(run_dir, 1), 150)
    e2e.hurry(tmp_path)
    e2e.wait_until_over(run_dir, 300)
    for role, event in (("actor", "step"), ("critic", "critic_step")):
        saved, *_ = e2e.events_of(run_dir, role, "checkpoint")
        resumed = e2e.events_of(run_dir, role, "critic_resume" if role == "critic" else "resume")
        assert [each["step"] for each in resumed] == [saved["step"]]
        steps = [each["step"] for each in e2e.events_of(run_dir, role, event)]
        assert steps == [*range(1, STEPS + 1)], role
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)


def test_a_run_that_may_not_be_requeued_goes_on_and_says_to_resume(tiny, tmp_path):
    refuse = {"engines.rollout.resources.sbatch": '["--no-requeue"]'}
    run_dir = submit_slow(tiny, tmp_path, **refuse)
    e2e.wait_until(run_dir, e2e.has_done(2), 150)
    announce(run_dir)
    e2e.wait_for(lambda: (found := verdict.read(run_dir)) and found.what == "refused", 60)
    assert verdict.read(run_dir).words.endswith("resume it")
    [saved] = e2e.events_of(run_dir, "actor", "checkpoint")
    e2e.hurry(tmp_path)
    e2e.wait_until(run_dir, e2e.has_done(saved["step"] + 2), 100)
    e2e.wait_until_over(run_dir, 200)
    assert e2e.events_of(run_dir, "actor", "resume") == []
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
