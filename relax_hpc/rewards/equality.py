r"""Whether two pieces of mathematics are the same: 1/2, \frac12 and 0.5, but not [1, 2) and (1, 2].

Equal texts and plain numbers are decided here, exactly; for all else there is math-verify, which is
given one expression, so that it has none to choose among.
"""

import re
from fractions import Fraction

from relax_hpc.rewards.answers import number, plain

_MOST_CHARACTERS = 2000
"""A longer text equals only itself."""
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:,\\!|\\,|\{,\})(?=\d{3})", re.ASCII)
_NOISE = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|boxed|fbox|[bB]igg?[lr]?|quad|qquad)(?![A-Za-z])"
    r"|\\[,!;: ]|~|\s+"
)
_DELIMITED = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_WRAPPED = re.compile(
    r"\{([^{}]*)\}|\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}"
)
_ASSIGNED = re.compile(r"\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([A-Za-z]\))? ?(?:=|\\in\b) ?([^=]+)")
_DIGITS_AS_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{ ?([\d.,]+) ?\}", re.ASCII)
_WORDS = re.compile(r"\(?([A-Za-z]{3}[A-Za-z '-]*|[A-Za-z])\)?")
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}[ ,.:]+){3}")
_SPELLED = {
    r"\$": "",
    r"\%": "%",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    r"^\circ": "°",
    r"^{\circ}": "°",
    r"\degree": "°",
    "**": "^",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "×": r"\times ",  # noqa: RUF001
    "·": r"\cdot ",
    "∪": r"\cup ",  # noqa: RUF001
    "±": r"\pm ",
    "²": "^{2}",
    "³": "^{3}",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
_ROOT = re.compile(r"√ ?(\d+|[A-Za-z])?", re.ASCII)
_SPELLING = re.compile("|".join(map(re.escape, sorted(_SPELLED, key=len, reverse=True))))
_UNITS = {
    "in": "in", "ft": "ft", "lb": "lb",
    "inches": "in", "inch": "in", "feet": "ft", "foot": "ft", "yards": "yd", "miles": "mi",
    "mm": "mm", "cm": "cm", "km": "km", "meters": "m", "metres": "m", "meter": "m", "metre": "m",
    "centimeters": "cm", "centimetres": "cm", "kilometers": "km", "kilometres": "km",
    "kg": "kg", "mg": "mg", "grams": "g", "kilograms": "kg", "pounds": "lb", "lbs": "lb",
    "seconds": "s", "sec": "s", "minutes": "min", "min": "min", "hours": "h", "hour": "h",
    "hrs": "h", "days": "day", "day": "day", "weeks": "week", "years": "year", "year": "year",
    "liters": "l", "litres": "l", "ml": "ml", "mph": "mi/h", "percent": "%", "degrees": "°",
    "degree": "°", "dollars": "$", "dollar": "$", "cents": "cent", "cent": "cent",
    "units": "unit", "unit": "unit", "ways": "way",
}  # fmt: skip
"""Units that may follow a number as a bare word -> their short form."""
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_UNIT = re.compile(
    r"(.*?[^\s{(\[,;=+*/^-])\s*(?:\\(?:text|textrm|mathrm|mbox)\{([^{}\\\d]*)\}"
    rf"|(?<![A-Za-z\\])((?:(?:{'|'.join(_POWERS)}) )?(?:{'|'.join(_UNITS)})(?![A-Za-z])|[°%]))"
    r"(?: ?\^ ?\{?([23])\}?)?",
    re.IGNORECASE,
)


def equal(given: str, wanted: str) -> bool:
    """Whether a text means what another means.

    Numbers are equal exactly: 0.333 is not 1/3. A unit may be left out, but not be another one; so
    50% is 50, and not 0.5. Nothing equals an empty text.
    """
    if len(given) > _MOST_CHARACTERS or len(wanted) > _MOST_CHARACTERS:
        return given == wanted
    given, wanted = tidy(given), tidy(wanted)
    if not given or not wanted or given == wanted:
        return given == wanted != ""
    (given, unit), (wanted, other) = _measured(given), _measured(wanted)
    if unit and other and unit != other:
        return False
    given, wanted = _alone(given, wanted), _alone(wanted, given)
    values = number(given), number(wanted)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    words = _WORDS.fullmatch(given), _WORDS.fullmatch(wanted)
    if words[0] and words[1]:
        return _folded(words[0][1]) == _folded(words[1][1])
    return given == wanted or (not _PROSE.search(given) and _verified(given, wanted))


def quantity(text: str) -> Fraction | None:
    """Returns the exact value of a number that may have a unit; None of anything else."""
    return number(_measured(tidy(text))[0]) if len(text) <= _MOST_CHARACTERS else None


def tidy(text: str) -> str:
    """Returns mathematics without what is only for the eye: dollars, spaces, sizes of brackets."""
    text = _SPELLING.sub(lambda sign: _SPELLED[sign[0]], plain(text))
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1]}}}" if root[1] else r"\sqrt", text)
    text = _NOISE.sub(lambda noise: noise[1] or " ", _BETWEEN_DIGITS.sub(",", text))
    text = _DIGITS_AS_TEXT.sub(r"\1", text).strip().rstrip(" .")
    for _ in range(3):
        inside = _DELIMITED.fullmatch(text) or _WRAPPED.fullmatch(text)
        if inside is None:
            break
        text = "".join(inside.groups(default="")).strip().rstrip(" .")
    return " ".join(text.lstrip("$").split())


def _measured(text: str) -> tuple[str, str]:
    """Returns what stands before a unit, and the unit in short; "" if there is none."""
    found = _UNIT.fullmatch(text)
    if found is None:
        return text, ""
    words = (found[2] or found[3] or "").lower().replace(".", "").split()
    power = next((_POWERS[word] for word in words if word in _POWERS), found[4] or "")
    names = [_UNITS.get(word, word.rstrip("s")) for word in words if word not in _POWERS]
    return found[1], " ".join(names) + power if names else ""


def _alone(text: str, other: str) -> str:
    """Returns the right side of `x = 5` where the other text is no equation."""
    found = _ASSIGNED.fullmatch(text)
    return found[1] if found and "=" not in other else text


def _folded(words: str) -> str:
    return words.casefold().strip() if len(words) > 1 else words


def _verified(given: str, wanted: str) -> bool:
    """Asks math-verify. It has no deadline here: a process that scores has one."""
    import logging

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing deadline
    # Units are gone already, and it takes 5t for five tons. Only LaTeX: else the last number in a
    # text would count where the text is no mathematics.
    written = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
    )
    parsed = [
        parse(
            rf"\boxed{{{text}}}",
            [LatexExtractionConfig(normalization_config=written)],
            parsing_timeout=None,
        )
        for text in (wanted, given)
    ]
    return bool(verify(*parsed, timeout_seconds=None))
