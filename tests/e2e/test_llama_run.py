"""The task of the demo with a tiny Llama: its tokenizer, its template, its positions."""

import json
from functools import partial
from types import SimpleNamespace

import llamas
import pytest
from e2e_runs import events_of, is_over, submit, wait_until

from relax_hpc.cli.demo import make_tiny, models

pytestmark = pytest.mark.long

STEPS = 12


def test_a_llama_learns_as_the_policy_of_the_demo_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = partial(llamas.tokenizer, chat_template=llamas.SHORT)
    with monkeypatch.context() as patched:
        llama = SimpleNamespace(tokenizer=tokenizer, model=llamas.model, save=models.save)
        patched.setattr(make_tiny, "models", llama)
        make_tiny.make(tmp_path / "tiny", progress=print)
    folder = tmp_path / "tiny" / "model"
    tokens = tokenizer()
    both = [tokens.convert_tokens_to_ids(t) for t in (llamas.TURN_END, llamas.MESSAGE_END)]
    ends = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": both}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    run_dir = submit(
        "demo", tmp_path / "tiny", local=True, schedule__num_steps=STEPS, eval__heldout__every=STEPS
    ).run_dir
    progress = wait_until(run_dir, is_over, 400)["progress"]
    assert progress["steps_done"] == STEPS
    steps = events_of(run_dir, "actor", "step")
    gaps = [step["engine_gap/max"] for step in steps if "engine_gap/max" in step]
    # Kernels of the two sides round otherwise, and on each machine; other positions are 1e-2 away.
    assert gaps and max(gaps) <= 1e-4
    assert progress["heldout_after"] > progress["heldout_before"] + 0.1
