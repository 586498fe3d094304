r"""Where in a response the answer stands.

Only text after the last `</think>` counts: a policy may try answers while it thinks. Of several
boxes, tags or lines the last counts, so that listing guesses does not pay.
"""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_FRACTION = re.compile(
    r"\\[dtc]?frac *(?:\{ *([+-]?\d+) *\}|(\d)) *(?:\{ *(\d+) *\}|(\d))", re.ASCII
)
_RATIO = re.compile(r"([+-]?) *(?:(\d+) +(?=\d))?([+-]?\d+)/(\d+)", re.ASCII)
_MAX_DIGITS = 400
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_PLAIN = _WIDE | {0x3000: 0x20, 0xA0: 0x20, 0x2212: 0x2D}


def final_text(response: str, in_thought: bool = False) -> str:
    """Returns what follows the last `</think>`; all of it where nobody thinks aloud.

    A thought that is opened and never closed has nothing after it.

    Args:
        response: text.
        in_thought: the text before it opened a thought; see `contract.Sample`.
    """
    _, closed, rest = response.rpartition("</think>")
    if "<think>" in rest:
        return "" if not closed else rest[: rest.index("<think>")]
    return "" if in_thought and not closed else rest


def last_box(text: str) -> str | None:
    r"""Returns the content of the \boxed{...} that is closed last; None if none is complete.

    One pass, whatever is babbled; a box that is never closed does not hide those before it.
    """
    opened: list[tuple[int, bool]] = []
    start = end = -1
    for brace in _BRACE.finditer(text):
        if brace[0] in (r"\{", r"\}"):
            continue
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened and (opening := opened.pop())[1]:
            start, end = opening[0], brace.start()
    return text[start:end].strip() if end >= 0 else None


def last_tag(text: str, name: str) -> str | None:
    """Returns the content of the last complete `<name>...</name>`; None if there is none."""
    before, closing, _ = text.rpartition(f"</{name}>")
    if not closing:
        return None
    _, opening, content = before.rpartition(f"<{name}>")
    return content.strip() if opening else None


def last_line(text: str, label: str = "Answer") -> str | None:
    """Returns what follows the last `Answer:` on the same line; None if nothing does."""
    lines = re.findall(rf"\b{label}[*_ \t]*:[*_ \t]*([^\n]*)", text, re.IGNORECASE)
    found = lines[-1].strip("*_ \t") if lines else ""
    return found or None


def line_or_box(text: str) -> str | None:
    """Returns what follows the last `Answer:`, else the last box; None if there is neither.

    A box on that line is opened.
    """
    line = last_line(text)
    return last_box(text) if line is None else _opened(line)


def marked(text: str) -> str | None:
    """Returns the last `<answer>`, else what follows the last `Answer:`, else the last box.

    None if there is none of these.
    """
    tag = last_tag(text, "answer")
    return line_or_box(text) if tag is None else _opened(tag)


def _opened(text: str) -> str:
    box = last_box(text)
    return text if box is None else box


def plain(text: str) -> str:
    """Returns text as it is compared: fullwidth characters are ordinary ones, no outer spaces."""
    return text.translate(_PLAIN).strip()


def number(text: str) -> Fraction | None:
    r"""Returns the exact value of a plain number: 75, -0.5, 1,000, 1e3, 3/4, \frac{3}{4} or 1 3/4.

    None for what is no number, divides by zero or has more than 400 digits.
    """
    text = plain(text).strip("$ ").rstrip(".")
    if len(text) > _MAX_DIGITS:
        return None
    if ratio := _RATIO.fullmatch(_FRACTION.sub(r" \1\2/\3\4", text).strip()):
        sign, whole, above, below = ratio.groups()
        return _mixed(sign, int(whole or 0), int(above), int(below))
    if not _NUMBER.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    try:
        return Fraction(Decimal(text.replace(",", "")))
    except InvalidOperation:
        return None


def _mixed(sign: str, whole: int, above: int, below: int) -> Fraction | None:
    if not below:
        return None
    value = whole + Fraction(above, below)
    return -value if sign == "-" else value
