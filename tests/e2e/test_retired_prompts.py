"""Prompts that are solved retire in a whole run, and kills change neither which nor when."""

from collections import Counter

import pytest
from e2e_runs import (
    cli,
    events_of,
    has_done,
    hurry,
    kill,
    planned,
    sized,
    submit,
    wait_for,
    wait_until,
    wait_until_over,
)

from relax_hpc.bus.audit import audit
from relax_hpc.bus.plan import read_chain
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

ROWS, STEPS, PROMPTS, SIBLINGS, TIMES, SEED = 12, 80, 2, 2, 2, 5
SPAN = 16 * PROMPTS * 2
"""Guids that are decided on together at max_staleness = 1; see docs/how-to/data.md."""
REWARD = """
import asyncio, pathlib

async def score(group):
    if pathlib.Path(__file__).with_name("slowly").exists():
        await asyncio.sleep(0.3)  # or the run may be over before somebody is killed
    flat = int(group[0].answer) % 5 < 2
    return [1.0 if flat else float(number % 2) for number, _ in enumerate(group)]
"""


def expected(tiny):
    """Batches, and of each skipped guid whether it was passed over: all follow from the answers."""
    settings = PromptsConfig(train=[f"{tiny}/train.jsonl[0:{ROWS}]"])
    records = Records(settings.mixture, settings)
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tiny / "model")
    prompts = PromptSource(records, tokens, shuffle_seed=SEED, settings=settings)
    teaching, solved, passed = [], {}, {}
    while len(teaching) < STEPS * PROMPTS:
        guid = len(teaching) + len(passed)
        prompt = prompts[guid]
        before = (guid // SPAN - 1) * SPAN
        times = Counter(row for at, row in solved.items() if at < before)
        if times[prompt.index] >= TIMES:
            passed[guid] = True
        elif int(prompt.answer) % 5 < 2:
            solved[guid], passed[guid] = prompt.index, False
        else:
            teaching.append(guid)
    steps = range(STEPS)
    return [(n + 1, teaching[n * PROMPTS : (n + 1) * PROMPTS]) for n in steps], passed


def has_retired(run_dir):
    """Whether a step is done whose batch passed over a prompt."""
    return any(e.get("groups/skipped_retired") for e in events_of(run_dir, "actor", "step"))


def test_solved_prompts_are_passed_over_as_if_nobody_had_been_killed(tiny, tmp_path):
    (tmp_path / "flat.py").write_text(REWARD)
    (tmp_path / "slowly").touch()
    run_dir = submit(
        "demo", tiny, local=True, seed=SEED,
        **sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 16) | {
            "prompts.train": f"{tiny}/train.jsonl[0:{ROWS}]", "prompts.retire_after": TIMES,
            "rollout.advanced.groups_per_shard": 1, "bus.keep_steps": STEPS,
            "reward.name": f"{tmp_path}/flat.py:score", "algorithm.groups.name": "refill",
            "algorithm.epochs_per_step": 1, "algorithm.preset": "async", "actor.save_every": 4,
            "algorithm.groups.truncated": "keep",
        },
    ).run_dir  # fmt: skip
    batches, passed = expected(tiny)
    last = batches[-1][1][-1]
    first = min(guid for guid, retired in passed.items() if retired)
    begins = next(step for step, guids in batches if guids[-1] > first)
    assert begins + 12 < STEPS  # what is asked for below happens in this run
    wait_until(run_dir, has_done(6), 200)
    kill(run_dir, "actor")
    # Both have to find out again who is retired, from the plan alone.
    wait_for(lambda: has_retired(run_dir), 300)
    kill(run_dir, "rollout")
    wait_until(run_dir, has_done(begins + 5), 200)
    kill(run_dir, "actor")
    hurry(tmp_path)
    after = wait_until_over(run_dir, 300)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert [len(events_of(run_dir, role, "start")) for role in ("actor", "rollout")] == [3, 2]
    assert planned(run_dir) == batches
    bus = RunPaths(run_dir).bus
    skipped = {each.guid: each for each in read_chain(bus).skipped if each.guid < last}
    assert {guid: each.retired for guid, each in skipped.items()} == {
        guid: retired for guid, retired in passed.items() if guid < last
    }
    assert all(each.solved for each in skipped.values())
    # Nobody was asked for one that is retired: it has no reward, and no response on the bus.
    assert {each.reward for each in skipped.values() if each.retired} == {None}
    counts = audit(bus)
    assert (counts.planned, counts.planned_twice) == (STEPS * PROMPTS * SIBLINGS, 0)
    assert counts.dropped == 0
    assert counts.retired >= SIBLINGS * sum(passed.values())
