"""Distillation as its user sees it: a student comes near to a teacher that knows more."""

import json
import random
from statistics import mean

import pytest
from e2e_runs import assert_every_prompt_once, cli, events_of, sized, submit, wait_until_over
from transformers import AutoModelForCausalLM

from relax_hpc.cli.demo import models
from relax_hpc.cli.demo.make_tiny import Example, warm_start

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 400, 128, 8


def examples(path):
    tokens = models.tokenizer()
    for row in map(json.loads, path.open()):
        prompt = tokens.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        answered = tokens.encode(row["completion"])
        yield Example(prompt, [*answered, tokens.eos_token_id])


def make_teacher(student, folder, **how):
    """The student after further supervision; how many prompts it gets right when it samples."""
    model = AutoModelForCausalLM.from_pretrained(student / "model", dtype="float32")
    shown, asked = (list(examples(student / f"{name}.jsonl")) for name in ("train", "heldout"))
    outcome = warm_start(model, shown, asked[:256], seed=1, progress=print, **how)
    models.save(folder, model, models.tokenizer())
    return outcome


def make_mostly(folder):
    """A model with random weights, and prompts that ask which of six digits is there most often."""
    tokens = models.tokenizer()
    models.save(folder / "model", models.model(tokens, seed=0), tokens)
    asked = {}
    draws = random.Random(1)
    while len(asked) < 12_700:
        digit, often = draws.choice("0123456789"), draws.choice((4, 4, 4, 5))
        word = [digit] * often + draws.choices("0123456789", k=6 - often)
        draws.shuffle(word)
        asked["".join(word)] = digit
    lines = [
        json.dumps(
            {
                "prompt": [{"role": "user", "content": f"mostly {word}="}],
                "answer": digit,
                "completion": f"\\boxed{{{digit}}}",
            }
        )
        + "\n"
        for word, digit in asked.items()
    ]
    (folder / "train.jsonl").write_text("".join(lines[:-512]))
    (folder / "heldout.jsonl").write_text("".join(lines[-512:]))


def scores_of(run_dir):
    return {
        each["when"]: each["correct"] / each["num_samples"]
        for each in events_of(run_dir, "rollout", "eval")
    }


@pytest.mark.soak
def test_a_student_with_random_weights_reaches_its_teacher(tmp_path):
    """Nothing it says at first is what its teacher would say."""
    make_mostly(tmp_path)
    teacher = make_teacher(tmp_path, tmp_path / "teacher", target=1.1, max_steps=100)
    settings = sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 512) | {
        "teachers.sums.path": tmp_path / "teacher", "prompts.train": tmp_path / "train.jsonl",
        "actor.optimizer.lr": 5e-4, "actor.optimizer.warmup_steps": 20,
        "actor.save_every": STEPS, "bus.keep_steps": STEPS,
    }  # fmt: skip
    run_dir = submit("tiny/arithmetic_distill", tmp_path, local=True, **settings).run_dir
    after = wait_until_over(run_dir, 3600)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert {each["name"] for each in after["components"]} == {"rollout", "actor", "teacher-sums"}
    assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    steps = events_of(run_dir, "actor", "step")
    first, last = (mean(step["distill/kl"] for step in part) for part in (steps[:5], steps[-5:]))
    assert last <= 0.6 * first
    scores = scores_of(run_dir)
    print(f"teacher {teacher}, held-out {scores}")
    assert scores["before"] <= 0.02
    assert scores["after"] >= teacher.greedy - 0.02
