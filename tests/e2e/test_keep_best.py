"""A run that is saved before it is cancelled, goes on, keeps its best policy and exports that."""

import re

import e2e_runs as e2e
import pytest
from transformers import AutoModelForCausalLM

from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.checkpoints import best

pytestmark = pytest.mark.long

STEPS, EVERY = 12, 4


def test_a_run_saved_as_it_is_cancelled_goes_on_and_exports_its_best_policy(tiny, tmp_path):
    small = e2e.sized(tmp_path, STEPS, 8, 4, 16) | {
        "reward.name": e2e.unhurried(tmp_path, 0.5), "actor.save_every": EVERY,
        "eval.heldout.every": EVERY, "actor.keep_checkpoints": 1,
        "actor.advanced.keep_best": "heldout",
    }  # fmt: skip
    run_dir = e2e.submit("demo", tiny, local=True, **small).run_dir
    e2e.wait_until(run_dir, e2e.has_done(EVERY + 1), 100)
    said = e2e.cli("cancel", run_dir, "--save")
    done = e2e.newest(run_dir, "actor", "step")["step"]
    assert EVERY < done < STEPS and done % EVERY
    assert f"saved: {run_dir}/checkpoints/step_{done:08d}" in said and "cancelled" in said
    e2e.hurry(tmp_path)
    e2e.cli("resume", run_dir, "--local")
    now = e2e.wait_until_over(run_dir, 100)
    assert now["state"] == "COMPLETED"
    assert [e["step"] for e in e2e.events_of(run_dir, "actor", "step")] == [*range(1, STEPS + 1)]
    paths = RunPaths(run_dir)
    scores = best.scores_of(paths, "heldout", EVERY)
    told = now["progress"]["best_policy"]
    assert set(scores) == {4, 8, 12} and told["score"] == max(scores.values())
    assert re.search(f"best +step {told['step']}, ", e2e.cli("status", run_dir))
    kept = [*paths.checkpoints.glob("step_*"), *paths.checkpoints.glob("best/step_*")]
    assert sorted(int(each.name[5:]) for each in kept) == sorted({told["step"], STEPS})
    e2e.cli("convert", run_dir, "--best", "--out", tmp_path / "best")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert model.num_parameters() > 0
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"# {run_dir.name}, step {told['step']}" in card and "after" in card
    assert (tmp_path / "best" / "reward.png").stat().st_size > 1000
