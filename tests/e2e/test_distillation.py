"""Distillation as its user sees it: a student comes near to a teacher that knows more."""

import json
from statistics import mean

import pytest
from e2e_runs import cli, events_of, every_prompt_once, is_over, planned, submit, wait_until
from transformers import AutoModelForCausalLM

from relax_hpc.demo import checkpoint
from relax_hpc.demo.warm_start import Example, warm_start

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 60, 64, 4
SETTINGS = {
    "schedule.num_steps": STEPS,
    "schedule.prompts_per_step": PROMPTS,
    "rollout.samples_per_prompt": SIBLINGS,
    "actor.optimizer.lr": 2.5e-4,
    "actor.optimizer.warmup_steps": 10,
    "actor.save_every": STEPS,
    "bus.keep_steps": STEPS,
    "eval.heldout.every": 0,
    "eval.heldout.num_prompts": 512,
}


def examples(path):
    tokens = checkpoint.tokenizer()
    for row in map(json.loads, path.open()):
        prompt = tokens.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        answered = tokens.encode(row["completion"])
        yield Example(prompt, [*answered, tokens.eos_token_id])


def make_teacher(student, folder):
    """The student after further supervision; how many sums it gets right when it samples."""
    model = AutoModelForCausalLM.from_pretrained(student / "model", dtype="float32")
    shown, asked = (list(examples(student / f"{name}.jsonl")) for name in ("train", "heldout"))
    how = {"target": 0.95, "seed": 1, "progress": print}
    outcome = warm_start(model, shown, asked[:128], **how)
    checkpoint.save(folder, model, checkpoint.tokenizer())
    return outcome


def test_a_student_comes_near_to_its_teacher_without_any_reward(tiny, tmp_path):
    teacher = make_teacher(tiny, tmp_path / "teacher")
    assert teacher.greedy >= 0.95
    settings = SETTINGS | {"run_root": tmp_path, "teachers.sums.path": tmp_path / "teacher"}
    run_dir = submit("tiny/arithmetic_distill", tiny, local=True, **settings).run_dir
    try:
        after = wait_until(run_dir, is_over, 220)
    finally:
        cli("cancel", run_dir)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert {each["name"] for each in after["components"]} == {"rollout", "actor", "teacher-sums"}
    assert planned(run_dir) == every_prompt_once(STEPS, PROMPTS)
    steps = events_of(run_dir, "actor", "step")
    first, last = (mean(step["distill/kl"] for step in part) for part in (steps[:5], steps[-5:]))
    scores = {
        each["when"]: each["correct"] / each["num_samples"]
        for each in events_of(run_dir, "rollout", "eval")
    }
    print(f"teacher {teacher}, divergence {first:.3f} to {last:.3f}, held-out {scores}")
    assert last <= 0.6 * first
    assert scores["after"] >= scores["before"] + 0.1
