"""Distillation as its user sees it: every response has the logprobs of a teacher of its own."""

import pytest
from e2e_runs import assert_every_prompt_once, cli, events_of, sized, submit, wait_until_over

pytestmark = pytest.mark.long

STEPS, PROMPTS = 4, 8


def test_a_student_trains_on_what_its_teacher_says_of_its_responses(tiny, tmp_path):
    """The teacher is the model that it begins as: it leaves that only by its updates."""
    settings = sized(tmp_path, STEPS, PROMPTS, 4, 16) | {"teachers.sums.path": tiny / "model"}
    run_dir = submit("tiny/arithmetic_distill", tiny, local=True, **settings).run_dir
    after = wait_until_over(run_dir, 200)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert {each["name"] for each in after["components"]} == {"rollout", "actor", "teacher-sums"}
    assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    kl = [step["distill/kl"] for step in events_of(run_dir, "actor", "step")]
    assert abs(kl[0]) < 1e-4 and len(kl) == STEPS, kl
