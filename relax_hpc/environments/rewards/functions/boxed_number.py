r"""1 for the right number in \boxed{}, else 0."""

import re
from decimal import Decimal

from relax_hpc.environments.rewards.answers import final_text, last_box

NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
REMEDY = "write a plain number, like 75, -0.5 or 1,000"


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    r"""Whether the last complete \boxed{...} of `response` holds the number `answer`.

    Only the last one counts, so that listing guesses does not pay. Numbers are compared by value:
    75, 75.0 and 1,000 for 1000 are right. A box around anything else, another box included, holds
    none.
    """
    box = last_box(final_text(response, in_thought))
    if box is None:
        return 0.0
    given, wanted = _number(box), _number(answer)
    return float(given is not None and given == wanted)


def can_match(answer: str) -> bool:
    return _number(answer) is not None


def _number(text: str) -> Decimal | None:
    text = text.strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None
