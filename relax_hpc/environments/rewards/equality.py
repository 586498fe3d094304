r"""Decides whether two pieces of mathematics are equal: 1/2, \frac12 and 0.5, but not [1, 2) and
(1, 2].

Equal texts, plain numbers and tuples of them are decided here, exactly. math-verify decides the
rest; it gets one expression, so that it cannot choose among several.

A computer algebra system evaluates 9^{9^9}, (10^9)! or a sum of a million terms in code that no
deadline interrupts. An answer with such an expression equals only itself.
"""

import re
from collections import deque
from fractions import Fraction
from math import inf, log10
from typing import Any, NamedTuple

from relax_hpc.environments.rewards.answers import REPEATING, number, plain, repeating

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d*)?|\.\d+|\S")
_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_CLOSING = {*_BRACKETS.values()}
_UNBOUNDED = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|Gamma|zeta|choose|[bp]?mod|uparrow)(?![A-Za-z])"
    r"|! *! *!|\\frac *\{ *(?:d|\\partial) *\}|(?:\\c[au]p.*){9}",
    re.DOTALL,
)
_CIRCULAR = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]eq?|neq?)(?![A-Za-z])")
_CONSTANTS = {"e": 0.435, r"\pi": 0.498}
_TWO = 0.302
_MOST_TOKENS = 300
_MOST_DEPTH = 8
_MOST_DIGITS = 7000
_MOST_DIGITS_WRITTEN = 100
_MOST_DIGITS_TURNED = 30
_MOST_STOREYS = 2
_MOST_TERMS = 2100
_MOST_SOLVED = 4
_MOST_EXPANDED = 60
_MOST_DEGREE = 250


class _Size(NamedTuple):
    """Decimal logarithms of bounds of a value; 0 for a letter."""

    most: float = 0.0
    least: float = 0.0

    @property
    def extent(self) -> float:
        """Size of the value or of its inverse, whichever is larger."""
        return max(self.most, -self.least, 0.0)


def is_too_large(text: str) -> bool:
    """Whether evaluating LaTeX could take long, by a bound of each part.

    Also true for more than 8 nested brackets, sums, limits, integrals, and roots of polynomials of
    a degree above 4.
    """
    tokens = deque(_TOKEN.findall(text))
    if len(tokens) > _MOST_TOKENS or _UNBOUNDED.search(text):
        return True
    reader = _Reader(tokens)
    extent = 0.0
    while tokens:
        extent = max(extent, reader.group(0).extent)
        if tokens:
            tokens.popleft()  # a bracket that nobody opened
    highest = _MOST_SOLVED if _RELATION.search(text) else inf
    most_digits = _MOST_DIGITS_TURNED if _CIRCULAR.search(text) else _MOST_DIGITS
    return extent > most_digits or reader.degree > _MOST_DEGREE or reader.highest > highest


class _Reader:
    """Bounds an expression, reading tokens from the left."""

    def __init__(self, tokens: deque[str]) -> None:
        self.tokens = tokens
        self.degree = 0.0
        """Sum of the exponents of non-numbers."""
        self.highest = 0.0
        """Largest of them."""
        self.num_names = 0
        self.storey = 0
        """Depth of nested exponents being read."""

    def group(self, depth: int) -> _Size:
        """Bounds everything up to a closing bracket, as a product or quotient of its parts."""
        sizes, inverse = list[_Size](), False
        while self.tokens and self.tokens[0] not in _CLOSING:
            is_over = self.tokens[0] == "/"
            size = self._power(depth)
            sizes.append(_Size(-size.least, -size.most) if inverse else size)
            inverse = is_over
        if len(sizes) == 1:
            return sizes[0]
        more = _TWO * len(sizes)
        most = sum(max(size.most, 0.0) for size in sizes) + more
        return _Size(most, -sum(size.extent for size in sizes) - more)

    def _power(self, depth: int) -> _Size:
        """Bounds an item with its exponents, indices and factorials."""
        first, num_names = self.tokens[0], self.num_names
        size = self._item(depth)
        is_symbolic = self.num_names > num_names
        while self.tokens and self.tokens[0] in ("^", "!", "_"):
            sign = self.tokens.popleft()
            if sign == "!":
                size = _factorial(size)
            elif sign == "_":  # (n)_{k} is n!/(n - k)!
                index = self._item(depth)
                size = _factorial(size) if first in _BRACKETS else _Size(size.most + index.extent)
            else:
                exponent = self._exponent(depth)
                if is_symbolic:
                    self.degree += exponent
                    self.highest = max(self.highest, exponent)
                    if exponent > _MOST_EXPANDED and not first.isalpha():
                        exponent = inf
                extent = max(size.extent, _TWO) * exponent
                size = _Size(extent, -extent)
        return size

    def _exponent(self, depth: int) -> float:
        self.storey += 1
        value = _value(self._power(depth).most) if self.tokens else 1.0
        self.storey -= 1
        return value if self.storey < _MOST_STOREYS else inf

    def _item(self, depth: int) -> _Size:
        if not self.tokens:
            return _Size()
        if depth > _MOST_DEPTH:
            self.tokens.clear()
            return _Size(inf)
        token = self.tokens.popleft()
        if token in _BRACKETS:
            size = self.group(depth + 1)
            if self.tokens:
                self.tokens.popleft()
            return size
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        if token == r"\frac":
            above, below = self._item(depth), self._item(depth)
            return _Size(above.most - below.least, above.least - below.most)
        if token in (r"\binom", r"\tbinom", r"\dbinom"):
            above, below = self._item(depth), self._item(depth)
            value = _value(above.most)
            return _Size(inf if value > _MOST_TERMS else value * _TWO + below.extent)
        if token in (r"\exp", r"\sinh", r"\cosh") and self.tokens:
            return _Size(_value(self._power(depth).most) * _CONSTANTS["e"])
        self.num_names += token[-1].isalpha() and token not in _CONSTANTS
        return _Size(_CONSTANTS.get(token, 0.0))


def _number(token: str) -> _Size:
    if len(token) > _MOST_DIGITS_WRITTEN:
        return _Size(inf)
    size = log10(float(token) or 1.0) if token != "." else 0.0
    return _Size(size, size)


def _value(size: float) -> float:
    return 10**size if size < 6 else inf


def _factorial(size: _Size) -> _Size:
    value = _value(size.most)
    return _Size(inf if value > _MOST_TERMS else max(value * size.most, size.most))


# ruff: noqa: RUF001


_MOST_CHARACTERS = 2000
"""A longer text equals only itself."""
_MOST_MATCHED = 8
"""Most list members compared one by one."""
_MOST_ROOT = 100
"""x^{1.0001} stays a decimal: the algebra of 10,000th roots never ends."""
_DIGITS_COMPARED = 60
"""Digits to compare constants to; with math-verify's 15, all values below 1e-15 are equal."""
_FONTS = (
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sc)?|math(?:rm|bf|it|sf|tt|normal)|[mh]box|operatorname\*?)"
    r"(?![A-Za-z])\s*"
)
_SPACE = r"(?:\\[,!;:> \n]|~|\s)"
_GROUPS = re.compile(
    rf"(?<![0-9_^])(?<![0-9][.,])(?<!frac)(?<!frac )[1-9][0-9]{{0,2}}"
    rf"(?:(?:{_SPACE}*(?:\{{,\}}|,{_SPACE}*\\!){_SPACE}*|{_SPACE}+)[0-9]{{3}})+(?![0-9]|{_SPACE}*/)"
    rf"|(?<=[0-9]\.)(?:[0-9]{{3}}{_SPACE}+)+[0-9]{{1,3}}(?![0-9]|{_SPACE}*/)"
)
r"""Digits in groups of three: 10{,}000, 10,\!000, 10\,000, 3.141\,592."""
_COMMAS = re.compile(r"(?<!\d)(?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d)", re.ASCII)
_BRACKET = re.compile(r"(?<!\\)[(\[]|\\\{")
_ALSO = re.compile(rf",?\s*{_FONTS}\{{\s*(?:and|or)\s*\}}\s*")
_BRACED = re.compile(r"(?<!\\)\{[^{}()\[\]&]*\}")
_NOISE = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|boxed|fbox|[bB]igg?[lr]?|quad|qquad|thinspace|hspace\{[^{}]*\})"
    rf"(?![A-Za-z])|{_SPACE}+"
)
_LOOSE = re.compile(r"(?<![A-Za-z\d,\\]) +| +(?![A-Za-z\d])", re.ASCII)
_ABOVE = re.compile(r"(\\frac) ?(?!\\sqrt)(\\[A-Za-z]+|[A-Za-z\d])", re.ASCII)
_BELOW = re.compile(r"(\\frac\{[^{}]*\}) ?(?!\\sqrt)(\\[A-Za-z]+|[A-Za-z\d])", re.ASCII)
_SPACED = re.compile(r"(?<!\d) | (?!\d)", re.ASCII)
_DELIMITED = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_WRAPPED = re.compile(rf"\{{([^{{}}]*)\}}|{_FONTS}\{{([^{{}}]*)\}}")
_ASSIGNED = re.compile(r"\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([A-Za-z]\))? ?(?:=|\\in\b) ?([^=]+)")
_DIGITS_AS_TEXT = re.compile(rf"{_FONTS}\{{ ?([\d.,]+) ?\}}", re.ASCII)
_LETTER_AS_TEXT = re.compile(
    rf"{_FONTS}\{{\s*([ie])\s*\}}|\\mathbf\s*\{{\s*([A-Za-z])\s*\}}|\\(?:imath|i)(?![A-Za-z])"
)
_FONT_INSIDE = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}]*)\}")
_WORDS = re.compile(r"\(?([A-Za-z]{3}[A-Za-z '-]*|[A-Za-z])\)?")
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}[ ,.:]+){3}")
_SPELLED = {
    r"\$": "¤",
    r"\%": "%",
    r"\pounds": "£",
    r"\euro": "€",
    r"\yen": "¥",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    r"^\circ": "°",
    r"^{\circ}": "°",
    r"^\degree": "°",
    r"^{\degree}": "°",
    r"\degree": "°",
    "º": "°",
    "**": "^",
    "–": "-",
    "‑": "-",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "×": r"\times ",
    "·": r"\cdot ",
    "∪": r"\cup ",
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
    "liters": "l", "litres": "l", "ml": "ml", "mph": "mi h-1", "percent": "%", "degrees": "°",
    "degree": "°", "dollars": "¤", "dollar": "¤", "cents": "cent", "cent": "cent",
    "euros": "€", "euro": "€", "yen": "¥", "yuan": "¥",
    "units": "unit", "unit": "unit", "ways": "way",
}  # fmt: skip
"""Units that may follow a number as a bare word -> their short form."""
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_EXPONENT = r"(?:\^\{?-?\d\}?)?"
_UNIT = re.compile(
    r"(.*?[^\s{(\[,;=+*/^-])\s*("
    rf"(?:(?:/|\\cdot)? ?{_FONTS}\{{(?:[^{{}}\\\d]|\^-?\d)*\}}{_EXPONENT})+"
    rf"|(?<![A-Za-z\\])(?:(?:(?:{'|'.join(_POWERS)}) )?(?:{'|'.join(_UNITS)})(?![A-Za-z])|[°%¤€£¥])"
    rf"{_EXPONENT})",
    re.IGNORECASE,
)
_UNIT_WORD = re.compile(r"([^\W\d_](?:[^\W\d_]|\.)*|[/°%¤€£¥])(?:\}?\^\{?(-?\d))?")
_CURRENCIES = ("¤", "€", "£", "¥")
_CURRENCY = re.compile(r"([+-]?)([¤€£¥]) ?(.+)")
_BASE = re.compile(
    rf"([+-]?)(?:\((?=[\dA-Z]+\))|{_FONTS}\{{)?(\d[\dA-Z]*|[A-Z]+\d[\dA-Z]*)[)}}]?"
    rf"_(?:(\d)|\{{\(?(?:{_FONTS}\{{)?(\d+|[a-z]+)\}}?\)?\}})",
)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SUBSCRIPT = re.compile(r"(?<=\d)_\{?(\d+)", re.ASCII)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<=[\d}})])\s*(?:{_FONTS}\{{ ?({'|'.join(_SCALES)}) ?([^{{}}]*)\}}"
    rf"|({'|'.join(_SCALES)})(?![A-Za-z]) ?)",
    re.IGNORECASE,
)
_ORDERED = {"()", "[]", "(]", "[)"}
_CLOSED_INFINITY = re.compile(r"\[-\\infty|\\infty ?\]")
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])([a-hj-zA-Z]?)i([a-hj-zA-Z]?)(?![A-Za-z])")
_INDEX = re.compile(r"(?<![\\A-Za-z])i ?[=_]|_\{?[^{}]*i")
_E_NOTATION = re.compile(r"(?<=\d)[eE]([+-]?\d+)", re.ASCII)
_EXPONENT_OPEN = re.compile(r"\^\{?[^{}]*$")
_DECIMAL = re.compile(r"(?<![\d.])\d*\.\d+(?![\d.%])", re.ASCII)


def equal(given: str, wanted: str) -> bool:
    """Whether two texts mean the same.

    Numbers are compared exactly: 0.333 is not 1/3. A unit may be missing on one side but not
    differ; so 50% is 50, and not 0.5. Nothing equals an empty text.
    """
    if len(given) > _MOST_CHARACTERS or len(wanted) > _MOST_CHARACTERS:
        return given == wanted != ""
    return _same(tidy(given), tidy(wanted))


def quantity(text: str) -> Fraction | None:
    """Returns the exact value of a number with or without a unit; None for anything else."""
    return number(_split_unit(tidy(text))[0]) if len(text) <= _MOST_CHARACTERS else None


def tidy(text: str) -> str:
    """Removes LaTeX that is only visual: dollars, spaces, sizes of brackets."""
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1]}}}" if root[1] else r"\sqrt", plain(text))
    text = _LETTER_AS_TEXT.sub(lambda letter: f" {letter[1] or letter[2] or 'i'}", text)
    text = _GROUPS.sub(lambda found: re.sub(r"[^0-9.]", "", found[0]), text)
    text = _ALSO.sub(", ", text)
    text = _FONT_INSIDE.sub(r"\\text{\1}", text)
    text = _COMMAS.sub(_join_groups, text) if not _BRACKET.search(text) else text
    text = _BRACED.sub(lambda braced: _COMMAS.sub(_join_groups, braced[0]), text)
    text = _NOISE.sub(lambda noise: noise[1] or " ", text)
    text = _SPELLING.sub(lambda sign: _SPELLED[sign[0]], _tight(text))
    text = _BELOW.sub(r"\1{\2}", _ABOVE.sub(r"\1{\2}", text))
    text = _DIGITS_AS_TEXT.sub(r"\1", text).strip().rstrip(" .,;")
    for _ in range(3):
        inside = _DELIMITED.fullmatch(text) or _WRAPPED.fullmatch(text)
        if inside is None:
            break
        text = "".join(inside.groups(default="")).strip().rstrip(" .,;")
    text = re.sub(r"\$([^$]*)\$", r"\1", text).replace("$", "¤")
    return _tight(_SCALE.sub(_expand_scale, text))


def _join_groups(groups: re.Match[str]) -> str:
    return groups[0].replace(",", "")


def _expand_scale(words: re.Match[str]) -> str:
    exponent = _SCALES[(words[1] or words[3]).lower()]
    return rf"\times10^{{{exponent}}}" + (rf"\text{{{words[2]}}}" if words[2] else " ")


def _tight(text: str) -> str:
    """Keeps spaces only between words and digits, and one after each comma."""
    return re.sub(r" ?, ?", ", ", _LOOSE.sub("", " ".join(text.split()))).strip()


def _same(given: str, wanted: str) -> bool:
    if not given or not wanted or _SPACED.sub("", given) == _SPACED.sub("", wanted):
        return bool(given and wanted)
    differ = _differ(given, wanted)
    (given, unit), (wanted, other) = _split_unit(given), _split_unit(wanted)
    if differ or (unit and other and unit != other):
        return False
    given, wanted = _alone(given, wanted), _alone(wanted, given)
    values = number(given), number(wanted)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    words = _WORDS.fullmatch(given), _WORDS.fullmatch(wanted)
    if words[0] and words[1]:
        return _fold(words[0][1]) == _fold(words[1][1])
    if given == wanted or _PROSE.search(given):
        return given == wanted
    (kind, parts), (other_kind, others) = _parts(given), _parts(wanted)
    if {kind, other_kind} <= _ORDERED and len(parts) == len(others) > 1:
        return kind == other_kind and all(map(_same, parts, others))
    return _verify(given, wanted) or (kind == other_kind and _match(parts, others))


def _differ(given: str, wanted: str) -> bool:
    """Whether texts differ in what math-verify ignores: bases, and a closed infinity."""
    bases, others = (set(_SUBSCRIPT.findall(text)) for text in (given, wanted))
    closed = [_CLOSED_INFINITY.search(text) is None for text in (given, wanted)]
    return bool(bases and others and bases != others) or closed[0] != closed[1]


def _split_unit(text: str) -> tuple[str, str]:
    """Splits a text from its unit in short form; "" without one.

    The base of a number is a unit as well: 1101_2 is 1101, and not 1101_3.
    """
    if base := _BASE.fullmatch(text):
        name = base[3] or base[4]
        name = str(_BASES.index(name) + 2) if name in _BASES else name
        return (base[1] + base[2], f"_{name}") if name.isdigit() else (text, "")
    text, unit = _paid(text)
    found = _UNIT.fullmatch(text)
    if found is None:
        return text, unit
    names, power, over = list[str](), "", ""
    for word, exponent in _UNIT_WORD.findall(re.sub(rf"{_FONTS}|\\cdot", "", found[2]).lower()):
        name = word.replace(".", "")
        if name in _POWERS:
            power = _POWERS[name]
        elif name in ("/", "per"):
            over = "-"
        else:
            short = _UNITS.get(name) or _UNITS.get(f"{name}s") or name.removesuffix("s") or name
            names.append(f"{short}{over}{exponent or power or (over and 1)}")
            power = ""
    if power and names:
        names[-1] += power
    is_money = bool(unit) or "".join(names[:1]) in _CURRENCIES
    return found[1], unit or (names[0] if names and is_money else " ".join(names))


def _paid(text: str) -> tuple[str, str]:
    """Splits a leading currency sign from an amount."""
    found = _CURRENCY.fullmatch(text)
    return (found[1] + found[3], found[2]) if found else (text, "")


def _alone(text: str, other: str) -> str:
    """Returns the right side of `x = 5` if the other text is no equation."""
    found = _ASSIGNED.fullmatch(text)
    return found[1] if found and "=" not in other else text


def _fold(words: str) -> str:
    return words.casefold().strip() if len(words) > 1 else words


def _parts(text: str) -> tuple[str, list[str]]:
    """Returns the brackets around a list, "" without any, and its members."""
    for opening, closing in (("([", ")]"), ((r"\{",), (r"\}",))):
        if text.startswith(tuple(opening)) and text.endswith(tuple(closing)):
            size = len(opening[0])
            inside = _split(text[size:-size])
            if inside:
                return text[:size] + text[-size:], inside
    return "", _split(text)


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets; [] for an unmatched closing bracket."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return []
        if sign in ",;" and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _match(given: list[str], wanted: list[str]) -> bool:
    """Whether the lists have the same members, in any order."""
    left = list(wanted)
    for part in given if 1 < len(given) == len(wanted) <= _MOST_MATCHED else ():
        found = next((each for each in left if _same(part, each)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _latex(text: str) -> str:
    """Returns tidy text for math-verify: without rounding, and i is imaginary."""
    text = _E_NOTATION.sub(r"\\times10^{\1}", text)
    text = REPEATING.sub(lambda found: _fraction(abs(repeating(found)), found[1]), text)
    text = _DECIMAL.sub(_exact, text)
    if not _INDEX.search(text):
        text = _IMAGINARY.sub(r"\1{I}\2", text)
    return re.sub("[°¤€£¥]", "", text)


def _exact(found: re.Match[str]) -> str:
    value = Fraction(found[0])
    is_root = value.denominator > _MOST_ROOT and _EXPONENT_OPEN.search(
        found.string[: found.start()]
    )
    return found[0] if is_root else _fraction(value, "")


def _fraction(value: Fraction, sign: str) -> str:
    return rf"{sign}{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _verify(given: str, wanted: str) -> bool:
    """Calls math-verify, without a deadline: the scoring process has one."""
    texts = [_latex(text) for text in (wanted, given)]
    if any(map(is_too_large, texts)):
        return False
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
            extraction_mode="first_match",  # else a fraction in what cannot be read would count
            parsing_timeout=None,
        )
        for text in texts
    ]
    if all(parsed) and _are_far_apart(parsed[0][0], parsed[1][0]):
        return False
    return bool(verify(*parsed, numeric_precision=_DIGITS_COMPARED, timeout_seconds=None))


def _are_far_apart(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether both are numbers with different digits, so that nothing has to be simplified."""
    if not all(getattr(each, "is_number", False) for each in (one, other)):
        return False
    try:
        gap = (one - other).doit()
        if gap.is_Rational:
            return bool(gap != 0)
        scale = abs(complex(one.evalf(20))) + abs(complex(other.evalf(20)))
        return abs(complex(gap.evalf(20))) > 1e-10 * scale
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # infinite, or not to be had
        return False
