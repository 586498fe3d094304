"""The demo with low-rank adaptation: engines compute what it learns, and peft gets the rest."""

import json

import pytest
from e2e_runs import cli, events_of, is_over, submit, wait_until
from safetensors.torch import load_file

pytestmark = pytest.mark.long

STEPS = 12


def test_adapters_learn_as_the_policy_of_the_demo_does(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = submit(
        "demo", tiny, local=True, schedule__num_steps=STEPS, eval__heldout__every=STEPS,
        actor__lora__rank=8, actor__optimizer__lr=5e-3,
    ).run_dir  # fmt: skip
    progress = wait_until(run_dir, is_over, 400)["progress"]
    assert progress["steps_done"] == STEPS and progress["checksums_equal"]
    gaps = [step.get("engine_gap/max", 0.0) for step in events_of(run_dir, "actor", "step")]
    # Kernels of the two sides round otherwise; weights of an update before are 1e-2 away.
    assert 0 < max(gaps) <= 5e-5
    assert progress["heldout_after"] > progress["heldout_before"] + 0.1

    cli("convert", run_dir, "--to", "peft", "--out", tmp_path / "adapters")
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert progress["parameters"]["trained"] == sum(t.numel() for t in adapters.values())
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["r"] == 8
    before = load_file(tiny / "model" / "model.safetensors")
    cli("convert", run_dir, "--to", "hf", "--out", tmp_path / "merged")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    assert progress["parameters"]["fixed"] == sum(t.numel() for t in before.values())
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if "_proj." in name}
