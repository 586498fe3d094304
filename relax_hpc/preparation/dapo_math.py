"""DAPO-Math-17k: 17 thousand problems of competitions whose answer is a whole number
(arXiv:2503.14476)."""

from collections.abc import Mapping
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Task, text

_WISH = "Think step by step, and put the final answer into \\boxed{}."
_BEFORE = "Solve the following math problem step by step."
_AFTER = "Remember to put your answer on its own line"
_ANSWERS = ("label", "solution", "answer")
"""Fields that hold the answer in one edition or another."""


def _task(fields: Mapping[str, Any]) -> Task:
    return Task(f"{_problem(fields)}\n\n{_WISH}", _answer(fields))


def _problem(fields: Mapping[str, Any]) -> str:
    """The problem alone: its own wish for an answer is another than ours."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        said = text(prompt[-1], "content")
    else:
        said = text(fields, "prompt")
    if said.startswith(_BEFORE):
        said = said.partition("\n\n")[2]
    return said.partition(_AFTER)[0].strip()


def _answer(fields: Mapping[str, Any]) -> str:
    model = fields.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return text(model, "ground_truth")
    there = [key for key in _ANSWERS if key in fields]
    if not there:
        raise ValueError(f"has no reward_model.ground_truth, {', '.join(_ANSWERS)}")
    return text({there[0]: str(fields[there[0]])}, there[0])


DAPO_MATH = DataSet("dapo-math", "BytedTsinghua-SIA/DAPO-Math-17k", ("/train",), _task)
