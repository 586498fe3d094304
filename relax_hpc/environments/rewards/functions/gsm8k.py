r"""1 for the right number after `####`, or else in the last \boxed{}; else 0 (arXiv:2110.14168).

The public grader takes the number that `#### (\-?[0-9\.\,]+)` finds, whatever follows it
(openai/grade-school-math, grade_school_math/dataset.py). So do we, for the last `####`; we also
skip decoration and currency before it.
"""

import re
from fractions import Fraction

from relax_hpc.environments.rewards.answers import final_text, last_box
from relax_hpc.environments.rewards.equality import quantity

REMEDY = "write a number, or a solution that ends with `#### 72`"
_MOST_CHARACTERS = 500
_BEFORE = re.compile(r"^(?:[\s*_`~$€£¥({\[]|\\(?:boxed|text\w*|math\w+)\s*\{|\\[^A-Za-z])*")
_NUMBER = re.compile(r"[+-]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)


def score(
    response: str, answer: str, *, in_thought: bool = False, last_number: bool = False
) -> float:
    """Whether the final number of a response is that of `answer`.

    Args:
        response: only the text after the last `</think>` counts.
        answer: a number, or a solution that ends with one after `####`.
        in_thought: the prompt opened a thought.
        last_number: fall back to the last number in the text.
    """
    given = _find_marked(final_text(response, in_thought), last_number)
    return float(given is not None and given == _parse_wanted(answer))


def marks(response: str) -> bool:
    return _find_marked(final_text(response), last_number=False) is not None


def can_match(answer: str) -> bool:
    return _parse_wanted(answer) is not None


def _parse_wanted(answer: str) -> Fraction | None:
    return quantity(answer.rpartition("####")[2])


def _find_marked(text: str, last_number: bool) -> Fraction | None:
    _, hashes, rest = text.rpartition("####")
    if hashes:
        return _first(rest.strip().partition("\n")[0])
    box = last_box(text)
    if box is None and last_number:
        box = (_NUMBER.findall(text) or [""])[-1].rstrip(",")
    return None if box is None else quantity(box)


def _first(line: str) -> Fraction | None:
    """Returns the number that begins a line, or None."""
    line = line.strip("*_` ")[:_MOST_CHARACTERS]
    whole = quantity(line)
    if whole is None:
        whole = quantity(line.partition(" ")[0].strip("*_`,;"))
    if whole is None and (found := _NUMBER.match(_BEFORE.sub("", line, count=1))):
        whole = quantity(found[0].rstrip(","))
    return whole
