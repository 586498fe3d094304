"""A tiny Qwen3-VL learns with SGLang to name colours that only pixels tell, as its user sees it.

RELAX_SGLANG_PYTHON names the interpreter of the engine.
`pytest -m sglang tests/e2e` runs these; they take half an hour.
"""

from pathlib import Path

import e2e_runs as e2e
import pytest
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.cli.demo import make_tiny

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]

PROMPTS, SIBLINGS = 32, 16


@pytest.fixture(scope="module")
def colours():
    """Folder with the model, prompts and images; made once per checkout."""
    folder = e2e.REPOSITORY / ".cache" / "tiny-vl"
    folder.parent.mkdir(exist_ok=True)
    make_tiny.make_seeing(folder, kind="vl", progress=print)
    return folder


def start(folder, run_root, *, local, steps, **settings):
    asked = {
        "run_root": run_root, "engines.rollout.resources.python": SGLANG_PYTHON,
        "engines.rollout.advanced.start_timeout_s": 600, "schedule.num_steps": steps,
        "prompts.train": f"{folder}/train.jsonl",
    }  # fmt: skip
    return e2e.submit("tiny/colours", folder, local=local, **asked | settings).run_dir


def assert_whole(run_dir, after, steps):
    """Every prompt once, engine and trainer of one mind after every update, an empty spool."""
    assert after["state"] == "COMPLETED"
    progress = after["progress"]
    e2e.assert_every_prompt_once(run_dir, steps, PROMPTS)
    counts = progress["trajectories"]
    assert (counts["trained"], counts["trained_twice"]) == (steps * PROMPTS * SIBLINGS, 0)
    assert progress["weight_versions"] == dict.fromkeys(["trainer", "rollout-0"], steps)
    assert progress["checksums_equal"] is True
    gaps = [step.get("logprob_gap/mean", 0.0) for step in e2e.events_of(run_dir, "actor", "step")]
    assert 0 < max(gaps) <= 1e-5, "nats; another image of the same size is above 1e-2"
    mine = {start["pid"] for start in e2e.events_of(run_dir, "rollout", "start")}
    spools = list(Path("/dev/shm").glob("relax-media-*"))  # their names say whose they are
    assert not any(f".{pid}." in each.name for pid in mine for each in spools)


@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("slurm_cluster")
def test_it_learns_through_slurm_though_rollout_and_actor_are_killed(colours, tmp_path):
    steps = 40
    run_dir = start(
        colours, tmp_path, local=False, steps=steps, launch__profile="local",
        actor__save_every=4, eval__heldout__every=0, eval__heldout__num_prompts=64,
    )  # fmt: skip
    e2e.wait_until(run_dir, e2e.has_done(2), 600)
    e2e.kill(run_dir, "rollout", "engine", e2e.NODE)
    done = e2e.newest(run_dir, "actor", "step")["step"]
    e2e.wait_until(run_dir, e2e.has_done(done + 3), 600)
    e2e.kill(run_dir, "actor")
    after = e2e.wait_until_over(run_dir, 600)
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 2
    assert e2e.newest(run_dir, "actor", "resume")["step"] >= 4
    assert_whole(run_dir, after, steps)
    progress = after["progress"]
    assert progress["heldout_before"] <= 0.4
    assert progress["heldout_after"] >= progress["heldout_before"] + 0.1, progress


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_job_reaches_nine_tenths(colours, tmp_path):
    run_dir = start(colours, tmp_path, local=True, steps=140)
    after = e2e.wait_until_over(run_dir, 1500)
    assert_whole(run_dir, after, 140)
    progress = after["progress"]
    assert progress["heldout_before"] <= 0.4 and progress["heldout_after"] >= 0.9, progress
