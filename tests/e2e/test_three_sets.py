"""Several sets scored during a run: no step waits for them, and a kill doubles nothing."""

import json

import pytest
from e2e_runs import NODE, cli, events_of, has_done, kill, submit, wait_until, wait_until_over

pytestmark = pytest.mark.long

REWARD = """
import asyncio, os

async def score(response, answer, metadata):
    while metadata.get("held") and not os.path.exists({gate!r}):
        await asyncio.sleep(0.05)
    return float(answer in response)
"""
STEPS, PROMPTS, KEPT = 9, 8, 3
SAMPLES = {"heldout": 1, "several": 4, "short": 2}


def rows_by_evaluation(run_dir, name):
    found = {}
    for path in sorted((run_dir / "eval" / name).glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        _, when, number = path.name.split(".")[0].split("-")
        found[when, int(number)] = rows
    return found


def parts_of(run_dir, name):
    [part] = (run_dir / "eval" / name).glob("*.part")
    return [row for line in part.read_text().splitlines() for row in json.loads(line)]


def place_of(row):
    return row["prompt"], row["sample"]


def begin(tiny, folder):
    """A run whose evaluations of two sets stand still until there is a file `gate`."""
    lines = (tiny / "heldout.jsonl").read_text().splitlines()[:PROMPTS]
    rows = [json.loads(line) | {"held": n >= KEPT} for n, line in enumerate(lines)]
    (folder / "held.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "mine.py").write_text(REWARD.format(gate=f"{folder}/gate"))
    sets = {
        "heldout": {"num_prompts": PROMPTS, "every": 3},
        "several": {
            "path": folder / "held.jsonl", "samples_per_prompt": 4, "temperature": 0.8,
            "top_p": 0.9, "top_k": 5, "every": 4,
        },
        "short": {
            "path": folder / "held.jsonl", "samples_per_prompt": 2, "temperature": 1.0,
            "stop": ["{"], "max_new_tokens": 5, "every": 0,
        },
    }  # fmt: skip
    keys = {f"eval.{name}.{key}": v for name, each in sets.items() for key, v in each.items()}
    return submit(
        "demo", tiny, local=True,
        **keys | {
            "run_root": folder, "schedule.num_steps": STEPS, "schedule.prompts_per_step": 8,
            "rollout.samples_per_prompt": 4, "rollout.advanced.groups_per_shard": 4,
            "reward.name": f"{folder}/mine.py:score", "reward.deadline_s": 300,
        },
    ).run_dir  # fmt: skip


def test_no_step_waits_for_three_sets_and_what_a_kill_broke_off_is_completed_once(tiny, tmp_path):
    run_dir = begin(tiny, tmp_path)
    wait_until(run_dir, has_done(3), 100)
    wait_until(run_dir, lambda _: len(parts_of(run_dir, "several")) == 4 * KEPT, 20)
    kept = {name: parts_of(run_dir, name) for name in ("several", "short")}
    assert len(kept["short"]) == 2 * KEPT and {r["version"] for r in kept["short"]} == {0}
    kill(run_dir, "rollout", "engine", NODE)
    wait_until(run_dir, lambda _: len(events_of(run_dir, "rollout", "start")) == 2, 60)
    wait_until(run_dir, has_done(6), 100)  # they stand still all the while
    assert rows_by_evaluation(run_dir, "several") == {}
    (tmp_path / "gate").touch()
    assert wait_until_over(run_dir, 200)["state"] == "COMPLETED"
    for name, samples in SAMPLES.items():
        found = rows_by_evaluation(run_dir, name)
        assert {"before", "after"} <= {when for when, _ in found}
        wanted = [(p, s) for p in range(PROMPTS) for s in range(samples)]
        for rows in found.values():
            assert list(map(place_of, rows)) == wanted
        said = [e for e in events_of(run_dir, "rollout", "eval") if e["name"] == name]
        # Who is killed between saying it and noting so says the same once more.
        scores = {(e["when"], e["number"], e["correct"], e["num_samples"]) for e in said}
        assert len(scores) == len(found) >= len(said) - 1
        assert not list((run_dir / "eval" / name).glob("*.part"))
    for name, rows in kept.items():
        before = rows_by_evaluation(run_dir, name)["before", 0]
        assert [row for row in before if row["prompt"] < KEPT] == sorted(rows, key=place_of)
    short = [row for rows in rows_by_evaluation(run_dir, "short").values() for row in rows]
    assert all(row["num_tokens"] <= 5 for row in short)
    stopped = [row["texts"][0] for row in short if row["finish"] == "stop"]
    assert stopped and all(text.count("{") == text.endswith("{") for text in stopped)
    assert "several" in cli("eval", run_dir)
