r"""1 for the right number after `####`, or else in the last \boxed{}; else 0 (arXiv:2110.14168)."""

import re
from fractions import Fraction

from relax_hpc.rewards.answers import final_text, last_box
from relax_hpc.rewards.equality import quantity

REMEDY = "write a number, or a solution that ends with `#### 72`"
_NUMBER = re.compile(r"[+-]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)


def score(
    response: str, answer: str, *, in_thought: bool = False, last_number: bool = False
) -> float:
    """Whether the number that a response ends on is that of `answer`.

    Args:
        response: text; what counts is after the last `</think>`.
        answer: a number, or a solution that ends with one after `####`.
        in_thought: the prompt opened a thought.
        last_number: a response that marks no number gives the last one in the text.
    """
    given = _marked(final_text(response, in_thought), last_number)
    return float(given is not None and given == _wanted(answer))


def can_match(answer: str) -> bool:
    """Whether an answer is a number."""
    return _wanted(answer) is not None


def _wanted(answer: str) -> Fraction | None:
    return quantity(answer.rpartition("####")[2])


def _marked(text: str, last_number: bool) -> Fraction | None:
    _, hashes, rest = text.rpartition("####")
    if hashes:
        return _first(rest.strip().partition("\n")[0])
    box = last_box(text)
    if box is None and last_number:
        box = (_NUMBER.findall(text) or [""])[-1].rstrip(",")
    return None if box is None else quantity(box)


def _first(line: str) -> Fraction | None:
    """Number that a line begins with, if words without another may follow."""
    number, _, words = line.partition(" ")
    return None if any(map(str.isdigit, words)) else quantity(number.rstrip(",;"))
