"""Supervised fine-tuning as its user sees it: killed or not, the same model, ready for RL."""

import random
import time
from pathlib import Path

import pytest
from e2e_runs import REPOSITORY, cli, events_of, kill, status, wait_until_over
from safetensors.torch import load_file

pytestmark = pytest.mark.long

STEPS, DOCUMENTS, BATCH = 30, 300, 32  # an epoch ends in the tenth step


def submit(tiny, run_root, name):
    train = run_root / "train.jsonl"
    train.write_text("".join((tiny / "train.jsonl").open().readlines()[:DOCUMENTS]))
    settings = {
        "name": name, "run_root": run_root, "model.path": tiny / "untrained", "sft.train": train,
        "sft.heldout": tiny / "heldout.jsonl", "sft.heldout_every": 10, "sft.num_steps": STEPS,
        "sft.batch_size": BATCH, "actor.layout.tensor_parallel": 1, "actor.save_every": 3,
        "actor.optimizer.warmup_steps": 4,
    }  # fmt: skip
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    cli("submit", REPOSITORY / "jobs" / "tiny" / "sft_arithmetic.toml", "--local", *overrides)
    return run_root / name


def test_a_run_that_is_killed_ends_with_the_very_weights_of_one_that_is_not(tiny, tmp_path):
    runs = [submit(tiny, tmp_path, name) for name in ("calm", "killed")]
    calm, killed = runs
    try:
        moment = random.uniform(4, STEPS - 3)
        kill_actor(killed, moment)
        for run_dir in runs:
            assert wait_until_over(run_dir, 100)["state"] == "COMPLETED"
        resumed = [event["step"] for event in events_of(killed, "actor", "resume")]
        assert resumed and resumed[0] in range(3, STEPS + 1, 3)

        ours, theirs = (load_file(run_dir / "model" / "model.safetensors") for run_dir in runs)
        assert all(ours[name].equal(theirs[name]) for name in ours.keys() | theirs.keys()), moment
        calm_losses, killed_losses = map(losses, runs)
        assert calm_losses == killed_losses, moment
        assert list(calm_losses) == [0, 10, 20, STEPS]

        progress = status(calm)["progress"]
        assert progress["heldout_loss"]["before"] > progress["heldout_loss"]["after"] + 1
        assert progress["documents"]["trained"] == STEPS * BATCH
        assert (calm / "loss.png").stat().st_size > 10_000
        assert any((calm / "tensorboard").iterdir())
        is_ready_for_rl(calm, tiny)
    finally:
        for run_dir in runs:
            cli("cancel", run_dir)


def kill_actor(run_dir, moment):
    """Some time after the step that `moment` is in: while it computes, measures or saves."""
    deadline = time.monotonic() + 100
    while len(events_of(run_dir, "actor", "step")) < moment:
        assert time.monotonic() < deadline, cli("logs", run_dir)[-4000:]
        time.sleep(0.1)
    time.sleep(moment % 1 / 5)
    kill(run_dir, "actor")


def losses(run_dir):
    """Step -> held-out loss."""
    return {event["step"]: event["loss"] for event in events_of(run_dir, "actor", "heldout")}


def is_ready_for_rl(run_dir, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(status(run_dir)["progress"]["exported_model"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(tiny / "untrained")
    assert not model.lm_head.weight.equal(start.lm_head.weight)
    tokens = AutoTokenizer.from_pretrained(folder)
    assert tokens.chat_template == AutoTokenizer.from_pretrained(tiny / "untrained").chat_template
    said = cli("submit", REPOSITORY / "jobs" / "demo.toml", "--local", "--dry-run",
               f"--set=model.path={folder}", f"--set=prompts.train={tiny / 'train.jsonl'}",
               f"--set=eval.heldout.path={tiny / 'heldout.jsonl'}",
               f"--set=run_root={run_dir.parent}", "--set=name=rl")  # fmt: skip
    assert "component_1" in said
