"""A reward of one's own that asks a second pool of engines."""

import json

from e2e_runs import is_over, submit, wait_until

REWARD = """
async def score(response, prompt, engines):
    said = await engines["judge"].generate(prompt, max_new_tokens=8)
    return float(said == response)

score.pools = ("judge",)
"""
STEPS, HELDOUT = 2, 16


def test_a_reward_asks_another_pool_which_answers_as_the_first_policy_did(tiny, tmp_path):
    """The judge has the weights that training begins with: it says what policy 0 says, greedily."""
    (tmp_path / "judge.py").write_text(REWARD)
    run_dir = submit(
        "demo", tiny, local=True,
        **{
            "run_root": tmp_path, "schedule.num_steps": STEPS, "schedule.prompts_per_step": 4,
            "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 8,
            "actor.optimizer.lr": 0.05, "eval.heldout.num_prompts": HELDOUT,
            "reward.name": f"{tmp_path}/judge.py:score", "reward.deadline_s": 60,
            "engines.judge.max_running_requests": 8,
        },
    ).run_dir  # fmt: skip
    now = wait_until(run_dir, is_over, 300)
    assert (now["state"], now["progress"]["steps_done"]) == ("COMPLETED", STEPS)
    before, after = (
        [json.loads(line) for path in files for line in path.read_text().splitlines()]
        for files in (
            sorted((run_dir / "eval" / "heldout").glob("*-before-*.jsonl")),
            sorted((run_dir / "eval" / "heldout").glob("*-after-*.jsonl")),
        )
    )
    assert [row["score"] for row in before] == [1.0] * HELDOUT
    assert sum(row["score"] for row in after) < HELDOUT, "the policy has moved, the judge has not"
