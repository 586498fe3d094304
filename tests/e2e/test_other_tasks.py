"""A run goes on with more and with fewer rollout tasks, and loses nothing that was begun."""

from contextlib import suppress

import e2e_runs as e2e
import psutil
import pytest

from relax_hpc.launch import record
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 6, 8, 4


def break_off(run_dir, tasks):
    """Announces the end, as Slurm would, and kills everything once all is kept.

    Returns the tokens of responses that were kept.
    """
    paths = RunPaths(run_dir)
    attempt = e2e.events_of(run_dir, "rollout", "start")[-1]["attempt"]
    before = len(e2e.events_of(run_dir, "rollout", "unfinished"))
    paths.ending(attempt).write_text("{}")
    saves = [paths.saves(attempt), *(paths.keeps(attempt, rank) for rank in range(tasks))]
    e2e.wait_for(lambda: all((read_json(path) or {}).get("step") is not None for path in saves), 60)
    controller = psutil.Process(record.read(run_dir).controller.pid)
    for process in [controller, *controller.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    e2e.wait_for(lambda: e2e.is_over(e2e.status(run_dir)), 60)
    kept = e2e.events_of(run_dir, "rollout", "unfinished")[before:]
    return sum(event["num_tokens"] for event in kept)


def go_on(run_dir, tasks):
    e2e.cli("resume", run_dir, "--local", "--set", f"engines.rollout.count={tasks}")


def test_two_tasks_then_one_then_three_train_on_every_prompt_once_and_keep_what_was_begun(
    tiny, tmp_path
):
    settings = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "reward.name": e2e.unhurried(tmp_path, 1.0), "engines.rollout.count": 2,
        "engines.rollout.max_running_requests": 64, "rollout.advanced.groups_per_shard": 2,
        "actor.save_every": 1000,
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=True, **settings).run_dir
    e2e.wait_until(run_dir, e2e.has_done(1), 120)
    kept = [break_off(run_dir, 2)]
    go_on(run_dir, 1)
    e2e.wait_until(run_dir, e2e.has_done(3), 120)
    kept.append(break_off(run_dir, 1))
    e2e.hurry(tmp_path)
    go_on(run_dir, 3)
    now = e2e.wait_until_over(run_dir, 120)
    assert now["state"] == "COMPLETED", e2e.cli("logs", run_dir)[-4000:]
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    assert [e["step"] for e in e2e.events_of(run_dir, "actor", "step")] == [*range(1, STEPS + 1)]
    counts = now["progress"]["trajectories"]
    assert counts["committed"] == counts["trained"] == STEPS * PROMPTS * SIBLINGS
    assert counts["trained_twice"] == 0
    gone_on = [e["num_tokens"] for e in e2e.events_of(run_dir, "rollout", "continued")]
    assert all(kept) and sum(gone_on) == sum(kept), (kept, gone_on)
    assert now["progress"]["redone"]["tokens_sampled_again"] == 0
    scored = [e for e in e2e.events_of(run_dir, "rollout", "eval") if e["when"] == "after"]
    assert sorted((e["rank"], e["tasks"]) for e in scored) == [(0, 3), (1, 3), (2, 3)]
