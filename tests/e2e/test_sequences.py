"""Episodes of two sequences through a whole run, rollout and actor killed in the middle of it."""

from pathlib import Path

import e2e_runs as e2e
import pytest

from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 12, 4, 4
SETTINGS = {
    "rollout.environment": f"{Path(__file__).with_name('two_attempts.py')}:TwoAttempts",
    "rollout.advanced.groups_per_shard": 2,
    "actor.save_every": 3,
    "bus.keep_steps": STEPS,
}


def test_episodes_of_two_sequences_are_trained_on_once_whoever_is_killed(tiny, tmp_path):
    small = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 16)
    run_dir = e2e.submit("demo", tiny, local=True, **small | SETTINGS).run_dir
    e2e.wait_until(run_dir, e2e.has_done(4), 100)
    e2e.kill(run_dir, "rollout", "engine", e2e.NODE)
    e2e.kill(run_dir, "actor")
    e2e.wait_until(run_dir, lambda _: e2e.events_of(run_dir, "actor", "resume"), 100)
    after = e2e.wait_until_over(run_dir, 200)
    e2e.assert_whole(run_dir, after, STEPS, PROMPTS, 2 * SIBLINGS)
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 2
    shards = e2e.events_of(run_dir, "rollout", "shard")
    assert all(0 <= shard["rollout/agree"] <= 1 for shard in shards)
    told = [shard["num_trajectories"] for shard in shards]
    untold = 2 * STEPS * PROMPTS * SIBLINGS - sum(told)
    assert 0 <= untold <= max(told), "a kill may come between a commit and the event of it"
    assert_rows_are_whole_episodes(run_dir)


def assert_rows_are_whole_episodes(run_dir):
    paths = RunPaths(run_dir).bus
    reader = Reader(paths)
    steps = {event["step"]: event for event in e2e.events_of(run_dir, "actor", "step")}
    for record in read_chain(paths).steps:
        assert record.num_trajectories == 2 * SIBLINGS * PROMPTS and record.last
        rows = reader.rows(record, range(record.num_trajectories))
        places = [(row.guid, row.sibling, row.segment) for row in rows]
        assert places == [(g, s, k) for g in record.guids for s in range(SIBLINGS) for k in (0, 1)]
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        assert all(first.reward == second.reward for first, second in pairs)
        # Two samples of one question: neither row holds the other's answer.
        assert all(first.prompt_len == second.prompt_len for first, second in pairs)
        told = steps[record.step]
        assert (
            abs(told["reward/mean"] - sum(first.reward for first, _ in pairs) / len(pairs)) < 1e-6
        )
        responses = sum(len(row.token_ids) - row.prompt_len for row in rows)
        assert abs(told["response/mean"] - responses / len(pairs)) < 1e-6
    reader.close()
