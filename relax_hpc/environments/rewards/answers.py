"""Finds the answer in a response.

Only text after the last `</think>` counts: a policy may try answers while it thinks. The last of
several boxes, tags or lines counts, so that listing guesses does not pay.
"""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from relax_hpc.data import thoughts

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_FRACTION = re.compile(
    r"\\[dtc]?frac *(?:\{ *([+-]?\d+) *\}|(\d)) *(?:\{ *(\d+) *\}|(\d))", re.ASCII
)
_RATIO = re.compile(r"([+-]?) *(?:(\d+) +(?=\d))?([+-]?\d+) */ *(\d+)", re.ASCII)
_POWER = re.compile(
    r"(?:(.+?) *(?:\\times|\\cdot|\*|\u00d7|\u00b7) *|([+-]?) *)10 *\^ *"
    r"(?:\{ *([+-]?) *(\d{1,3}) *\}|([+-]?)(\d{1,3}))",
    re.ASCII,
)
REPEATING = re.compile(
    r"([+-]?)(\d*)\.(\d*)(?:\\(?:overline|bar) *(?:\{ *(\d+) *\}|(\d))"
    r"|\\dot *\{? *(\d) *\}?(?:(\d*)\\dot *\{? *(\d) *\}?)?|(?<=\.)\((\d+)\))",
    re.ASCII,
)
r"""Repeating decimals: 0.1\overline{6}, 0.1\dot{6}, 0.(3)."""
_MAX_DIGITS = 400
_MOST_LABELS = 3
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_UNSEEN = dict.fromkeys((0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))
_PLAIN = _WIDE | _UNSEEN | {0x3000: 0x20, 0xA0: 0x20, 0x2212: 0x2D}


def final_text(response: str, in_thought: bool = False) -> str:
    """Returns what follows the last thought that ends; all of it where nobody thinks aloud.

    A thought that is opened and never closed has nothing after it. Tags that are quoted, or that a
    sentence speaks of, are data; see `thoughts.strip_thoughts`.

    Args:
        response: text.
        in_thought: the text before it opened a thought; see `contract.Sample`.
    """
    found = thoughts.strip_thoughts(response, in_thought=in_thought)
    return response[found.begin : found.end]


def last_box(text: str) -> str | None:
    r"""Returns the content of the \boxed{...} that is closed last; None if none is complete.

    Takes one pass over any text; an unclosed box does not hide earlier ones.
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
    """Returns the content of the last complete `<name>...</name>`, or None."""
    before, closing, _ = text.rpartition(f"</{name}>")
    if not closing:
        return None
    _, opening, content = before.rpartition(f"<{name}>")
    return content.strip() if opening else None


def last_line(text: str, label: str = "Answer") -> str | None:
    r"""Returns the text after the last nonempty `Answer:`, or None.

    It stands on the same line, or on the next nonempty one, as in DAPO and verl:
    `Answer\s*:\s*([^\n]+)`.
    """
    marks = [*re.finditer(rf"\b{label}[*_\s]*:", text, re.IGNORECASE)]
    for mark in reversed(marks[-_MOST_LABELS:]):
        if found := text[mark.end() :].lstrip("*_ \t\r\n").partition("\n")[0].strip("*_ \t\r"):
            return found
    return None


def line_or_box(text: str) -> str | None:
    """Returns the text after the last `Answer:`, else the last box, else None.

    A box on that line is opened.
    """
    line = last_line(text)
    return last_box(text) if line is None else _open_box(line)


def marked(text: str) -> str | None:
    """Returns the last `<answer>`, else the text after the last `Answer:`, else the last box,
    else None."""
    tag = last_tag(text, "answer")
    return line_or_box(text) if tag is None else _open_box(tag)


def _open_box(text: str) -> str:
    box = last_box(text)
    return text if box is None else box


def plain(text: str) -> str:
    """Normalises fullwidth characters and strips spaces."""
    return text.translate(_PLAIN).strip()


def number(text: str) -> Fraction | None:
    r"""Returns the exact value of a plain number: 75, -0.5, 1,000, 3/4, \frac{3}{4} or 1 3/4.

    Also with powers of ten, 1e3 or 2 \times 10^{3}, and repeating decimals, 0.\overline{3}. None
    for other text, division by zero, or more than 400 digits.
    """
    text = plain(text).strip("$ ").rstrip(".")
    if len(text) > _MAX_DIGITS:
        return None
    if power := _POWER.fullmatch(text):
        factor = number(power[1] or f"{power[2]}1")
        exponent = int("".join(part or "" for part in power.groups()[2:]))
        return None if factor is None else factor * Fraction(10) ** exponent
    if found := REPEATING.fullmatch(text):
        return repeating(found)
    if ratio := _RATIO.fullmatch(_FRACTION.sub(r" \1\2/\3\4", text).strip()):
        sign, whole, above, below = ratio.groups()
        return _make_mixed(sign, int(whole or 0), int(above), int(below))
    if not _NUMBER.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    try:
        return Fraction(Decimal(text.replace(",", "")))
    except InvalidOperation:
        return None


def _make_mixed(sign: str, whole: int, above: int, below: int) -> Fraction | None:
    if not below:
        return None
    value = whole + Fraction(above, below)
    return -value if sign == "-" else value


def repeating(found: re.Match[str]) -> Fraction:
    """Returns the value of a match of `REPEATING`."""
    sign, whole, once, *again = (part or "" for part in found.groups())
    digits = "".join(again)
    value = Fraction(int(digits), 10 ** len(digits) - 1) + int(f"0{whole}{once}")
    return value / Fraction(f"{sign}1e{len(once)}")
