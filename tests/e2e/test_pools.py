"""Two pools in one run: the policy's is given weights, the other stays as it is and can be asked
by whoever knows where the run is."""

import asyncio
import os
import signal

from e2e_runs import console, events_of, has_done, is_over, status, submit, wait_until

from relax_hpc.fleet import members
from relax_hpc.fleet.roster import Roster
from relax_hpc.paths import RunPaths
from relax_hpc.sampling.client import open_pool

STEPS = 90
PROMPT, ROOM = [5, 6, 7, 8], 6


def ask(run_dir):
    """Asks the judge, greedily."""

    async def once():
        async with open_pool(run_dir, "judge", stop_token=-1) as pool:
            return await asyncio.wait_for(pool.complete(PROMPT, ROOM), 90)

    return asyncio.run(once())


def newest(run_dir, component, event):
    return events_of(run_dir, component, event)[-1]


def test_a_fixed_pool_answers_as_ever_while_the_policys_is_updated_and_after_its_engine_was_killed(
    tiny, tmp_path
):
    run_dir = submit(
        "demo", tiny, local=True, run_root=tmp_path, name="pools",
        schedule__num_steps=STEPS, schedule__prompts_per_step=8, actor__save_every=5,
        rollout__samples_per_prompt=4, eval__heldout__every=0, eval__heldout__num_prompts=8,
        engines__judge__start_timeout_s=200,
        engines__judge__max_running_requests=2,
    ).run_dir  # fmt: skip
    paths = RunPaths(run_dir)
    try:
        first = ask(run_dir)  # waits until it is healthy
        wait_until(run_dir, has_done(2), 100)
        assert Roster.read(paths).version >= 1
        again = ask(run_dir)
        assert again.token_ids == first.token_ids and len(first.token_ids) == ROOM
        assert list(again.logprobs) == list(first.logprobs)  # the very same weights
        os.kill(newest(run_dir, "judge", "engine")["engine_pid"], signal.SIGKILL)
        done = status(run_dir)["progress"]["steps_done"]
        assert ask(run_dir).token_ids == first.token_ids
        assert len(events_of(run_dir, "judge", "engine")) == 2
        assert members.find(paths, "judge-0").pool == "judge"
        wait_until(run_dir, has_done(min(done + 1, STEPS)), 100)
        after = wait_until(run_dir, is_over, 200)
        assert after["state"] == "COMPLETED"
        # Who is given weights, and whose checksums are compared: the policy's engines alone.
        assert after["progress"]["weight_versions"] == {"trainer": STEPS, "rollout-0": STEPS}
        assert list(Roster.read(paths).members) == ["rollout-0"]
        assert members.find(paths, "judge-0").state == "GONE"
        assert [event["start"] for event in events_of(run_dir, "judge", "start")] == [1]
        assert events_of(run_dir, "judge", "end")
    finally:
        console("cancel", run_dir)
