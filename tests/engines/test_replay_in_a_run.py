"""A whole run of a mixture of experts with SGLang: what the run itself says of routing replay."""

import json

import pytest
import torch
from megatron_reference import SHAPE
from sglang_under_test import SGLANG_PYTHON
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from relax_hpc.cli.demo import models
from relax_hpc.cli.main import app
from relax_hpc.runs.cancel import cancel
from relax_hpc.runtime.telemetry.events import read_events

STEPS, PROMPTS = 2, 8
LAYERS, EXPERTS, PER_TOKEN = 4, 8, 2
JOB = """
name = "{name}"
run_root = "runs"
model = {{ path = "{name}-model", dtype = "bfloat16" }}
prompts.train = "train.jsonl"
reward.name = "random"

[rollout]
samples_per_prompt = 8
max_new_tokens = 48

[engines.rollout]
kind = "sglang"
max_running_requests = 64
start_timeout_s = 300

[engines.rollout.resources]
python = "{python}"

[actor]
tokens_per_micro_batch = 2048

[schedule]
num_steps = {steps}
prompts_per_step = {prompts}
max_staleness = 0
"""


def model(folder, *, experts):
    """A Qwen3 of random weights, with experts or without, and the tiny task's tokenizer."""
    tokens = models.tokenizer()
    shape = SHAPE | {"vocab_size": models.VOCAB_SIZE, "num_hidden_layers": LAYERS}
    shape |= {"intermediate_size": 128, "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    if experts:
        made = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shape, moe_intermediate_size=32, num_experts=EXPERTS,
                num_experts_per_tok=PER_TOKEN, norm_topk_prob=True, tie_word_embeddings=False,
            )
        )  # fmt: skip
    else:
        made = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False))
    models.save(folder, made.float(), tokens)


def steps_of(folder, name):
    """The `step` events of a run, which is waited for."""
    model(folder / f"{name}-model", experts=name == "mixture")
    settings = {"name": name, "python": SGLANG_PYTHON, "steps": STEPS, "prompts": PROMPTS}
    (folder / "job.toml").write_text(JOB.format(**settings))
    try:
        answer = CliRunner().invoke(app, ["submit", "job.toml", "--local", "--follow"])
    finally:
        if (folder / "runs" / name).exists():
            cancel(folder / "runs" / name)
    assert answer.exit_code == 0, f"{answer.output[-4000:]}\n{answer.exception!r}"
    steps = [e for e in read_events(folder / "runs" / name / "events") if e["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    return steps


@pytest.mark.parametrize("engine", ["sglang"])
def test_a_runs_gap_to_its_engine_is_with_replay_that_of_a_dense_model(
    engine, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(10, 42)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dense, mixture = steps_of(tmp_path, "dense"), steps_of(tmp_path, "mixture")
    gaps = [step["logprob_gap/mean"] for step in mixture]
    measured = next(step for step in mixture if "routing/gap" in step)
    print(f"dense {[step['logprob_gap/mean'] for step in dense]}, with replay {gaps}, {measured}")
    # Every token was sent where the engine had sent it, and some would have gone elsewhere.
    assert all(step["routing/missing"] == 0 < step["routing/differs"] for step in mixture)
    assert max(gaps) <= max(step["logprob_gap/mean"] for step in dense)
    assert measured["routing/gap_without"] > 1.5 * measured["routing/gap"]
    assert not any(name.startswith("routing/") for step in dense for name in step)
