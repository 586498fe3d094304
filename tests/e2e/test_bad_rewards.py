"""A run with a reward of somebody's that hangs, dies and fails now and then."""

from e2e_runs import events_of, is_over, submit, wait_until

REWARD = """
import hashlib, os, time

def score(response, answer):
    chance = hashlib.sha256((response + answer).encode()).digest()[1] / 256
    if response == answer:
        return 1.0  # as check asks
    if chance < 0.02:
        time.sleep(1000)
    if chance < 0.04:
        os._exit(1)
    if chance < 0.06:
        raise ValueError("a bug")
    return chance
"""
STEPS, PROMPTS, SIBLINGS = 4, 8, 8


def test_a_run_goes_on_when_a_reward_hangs_dies_and_fails(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    run_dir = submit(
        "demo", tiny, local=True,
        **{
            "run_root": tmp_path, "schedule.num_steps": STEPS,
            "schedule.prompts_per_step": PROMPTS, "rollout.samples_per_prompt": SIBLINGS,
            "rollout.groups_per_shard": 4, "eval.heldout.num_prompts": 64,
            "reward.name": f"{tmp_path}/mine.py:score", "reward.deadline_s": 0.5,
        },
    ).run_dir  # fmt: skip
    now = wait_until(run_dir, is_over, 300)
    assert (now["state"], now["progress"]["steps_done"]) == ("COMPLETED", STEPS)
    failed = events_of(run_dir, event="reward_errors")
    count, total = (sum(each[key] for each in failed) for key in ("num_errors", "num_samples"))
    assert 0 < count < 0.3 * total
