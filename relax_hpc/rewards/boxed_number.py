r"""1 for the right number in \boxed{}, else 0."""

import re
from decimal import Decimal, InvalidOperation

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def score(response: str, answer: str) -> float:
    r"""Whether the last complete \boxed{...} of `response` holds the number `answer`.

    Only the last one counts, so that listing guesses does not pay. Numbers are compared as
    numbers: 75, 75.0 and 1,000 for 1000 are right. A box with another brace inside holds none.
    """
    boxes = BOX.findall(response)
    if not boxes:
        return 0.0
    given, wanted = _number(boxes[-1]), _number(answer)
    return float(given is not None and given == wanted)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
