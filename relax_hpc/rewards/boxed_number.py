r"""1 for the right number in \boxed{}, else 0."""

import re
from decimal import Decimal

BRACE = re.compile(r"\\boxed\{|[{}]")
NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
REMEDY = "write a plain number, like 75, -0.5 or 1,000"


def score(response: str, answer: str) -> float:
    r"""Whether the last complete \boxed{...} of `response` holds the number `answer`.

    Only the last one counts, so that listing guesses does not pay. Numbers are compared as
    numbers: 75, 75.0 and 1,000 for 1000 are right. A box around anything else, another box
    included, holds none.
    """
    box = _last_box(response)
    if box is None:
        return 0.0
    given, wanted = _number(box), _number(answer)
    return float(given is not None and given == wanted)


def can_match(answer: str) -> bool:
    """Whether an answer is a number."""
    return _number(answer) is not None


def _last_box(text: str) -> str | None:
    """Content of the box that is closed last. One pass: a policy may babble braces at length."""
    opened: list[re.Match[str]] = []
    start = end = -1
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[0] != "{":
            start, end = opening.end(), brace.start()
    return text[start:end] if end >= 0 else None


def _number(text: str) -> Decimal | None:
    text = text.strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None
