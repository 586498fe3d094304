"""Two pools in one run: the policy's is given weights, the other stays as it is and can be asked
by a reward of one's own, and by whoever knows where the run is."""

import asyncio
import json

import pytest
from e2e_runs import events_of, has_done, kill, status, submit, wait_until, wait_until_over

from relax_hpc.inference import members
from relax_hpc.inference.members import Roster
from relax_hpc.inference.pool_client import open_pool
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, HELDOUT = 24, 16
PROMPT, ROOM = [5, 6, 7, 8], 6
REWARD = """
async def score(response, prompt, engines):
    said = await engines["judge"].generate(prompt, max_new_tokens=8)
    return float(said == response)

score.pools = ("judge",)
"""


def ask(run_dir):
    """Asks the judge, greedily."""

    async def once():
        async with open_pool(run_dir, "judge", stop_token=-1) as pool:
            return await asyncio.wait_for(pool.complete(PROMPT, ROOM), 90)

    return asyncio.run(once())


def scores(run_dir, when):
    files = sorted((run_dir / "eval" / "heldout").glob(f"*-{when}-*.jsonl"))
    return [json.loads(line)["score"] for path in files for line in path.read_text().splitlines()]


def test_a_fixed_pool_answers_as_ever_while_the_policys_is_updated_and_after_its_engine_was_killed(
    tiny, tmp_path
):
    """The judge has the weights that training begins with: it says what policy 0 says, greedily."""
    (tmp_path / "judge.py").write_text(REWARD)
    run_dir = submit(
        "demo", tiny, local=True, run_root=tmp_path, name="pools",
        schedule__num_steps=STEPS, schedule__prompts_per_step=8, actor__save_every=5,
        actor__optimizer__lr=0.05, rollout__samples_per_prompt=4,
        eval__heldout__every=0, eval__heldout__num_prompts=HELDOUT,
        reward__name=f"{tmp_path}/judge.py:score", reward__deadline_s=60,
        engines__judge__advanced__start_timeout_s=200,
        engines__judge__max_running_requests=8,
    ).run_dir  # fmt: skip
    paths = RunPaths(run_dir)
    first = ask(run_dir)  # waits until it is healthy
    wait_until(run_dir, has_done(2), 100)
    assert Roster.read(paths).version >= 1
    again = ask(run_dir)
    assert again.token_ids == first.token_ids and len(first.token_ids) == ROOM
    # The very same weights, and other requests beside it.
    assert list(again.logprobs) == pytest.approx(list(first.logprobs), abs=1e-5)
    kill(run_dir, "judge", "engine", ["engine_pid"])
    done = status(run_dir)["progress"]["steps_done"]
    assert ask(run_dir).token_ids == first.token_ids
    assert len(events_of(run_dir, "judge", "engine")) == 2
    assert members.find(paths, "judge-0").pool == "judge"
    wait_until(run_dir, has_done(min(done + 1, STEPS)), 100)
    after = wait_until_over(run_dir, 200)
    assert after["state"] == "COMPLETED"
    # Who is given weights, and whose checksums are compared: the policy's engines alone.
    assert after["progress"]["weight_versions"] == {"trainer": STEPS, "rollout-0": STEPS}
    assert list(Roster.read(paths).members) == ["rollout-0"]
    assert members.find(paths, "judge-0").state == "GONE"
    assert [event["start"] for event in events_of(run_dir, "judge", "start")] == [1]
    assert events_of(run_dir, "judge", "end")
    assert scores(run_dir, "before") == [1.0] * HELDOUT
    assert sum(scores(run_dir, "after")) < HELDOUT, "the policy has moved, the judge has not"
