"""Makes foreign text printable, switches to UTF-8, words validation errors, and aligns tables."""

import codecs
import io
import locale
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.errors import nearest, show

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters, which act on a terminal, and marks that change the text direction."""


def printable(text: str) -> str:
    """Replaces control characters by visible symbols."""
    return _UNPRINTABLE.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def shorten(text: str, most: int) -> str:
    """Leaves out the middle of a text that has more than `most` letters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} letters ...] {text[-half:]}"


def argument(path: object) -> str:
    """Quotes a path for the shell if needed."""
    return shlex.quote(str(path))


_VARIABLE = "PYTHONUTF8"
"""Python's own; children inherit it."""


def enter() -> None:
    """Restarts this process in Python's UTF-8 mode if the locale has another encoding.

    Job files, records and scripts are UTF-8: a file name read from them would be written with other
    bytes, or be an error.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name != "utf-8" and _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_utf8(text: str) -> bool:
    """Whether a text has no surrogate escapes, which stand for invalid bytes of file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def print_anything(encoding: str | None = None) -> None:
    """Makes this process print unprintable characters as escapes: model texts and file names may
    hold any.

    Args:
        encoding: of the output; default is the terminal's, and UTF-8 in the C locale.
    """
    if encoding is None:
        encoding = codecs.lookup(locale.getencoding()).name
        encoding = "utf-8" if encoding == "ascii" else encoding
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


_ALLOWED = {
    "missing": "is required; add it",
    "extra_forbidden": "is no known key; remove it",
    "int_type": "use a whole number, without a point or quotes",
    "int_": "use a whole number",
    "float_type": "use a number, without quotes",
    "float_": "use a number",
    "finite_number": "use a finite number",
    "bool_": "use true or false",
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use more than {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use less than {lt}",
    "multiple_of": "use a multiple of {multiple_of}",
    "literal_error": "use {expected}",
    "enum": "use {expected}",
    "string_type": "use text, in quotes",
    "string_too_short": "use {min_length} or more characters",
    "string_too_long": "use {max_length} or fewer characters",
    "string_pattern_mismatch": "does not match {pattern}",
    "path_type": "use a path, in quotes",
    "list_type": "use a list, in brackets",
    "tuple_type": "use a list, in brackets",
    "too_short": "use {min_length} or more entries",
    "too_long": "use {max_length} or fewer entries",
    "dict_type": "is a table of settings, not one value",
    "model_": "is a table of settings, not one value",
}
"""Prefixes of pydantic's error types -> what is allowed; the first match counts."""
_DECLARED = "does not fit what is declared there"


def wrong(item: Mapping[str, Any]) -> str:
    """Describes a validation error, or what is allowed.

    Args:
        item: one of pydantic's `errors()`.
    """
    kind, limits = str(item["type"]), item.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return " ".join(str(limits["error"]).split()) or _DECLARED
    for begin, words in _ALLOWED.items():
        if kind.startswith(begin):
            said = words.format_map({name: _short(limit) for name, limit in limits.items()})
            known = re.findall("'(.*?)'", str(limits.get("expected", "")))
            return "; ".join(filter(None, (said, nearest(show(item["input"]), known))))
    return _DECLARED if "url" in item else str(item["msg"])  # a plug-in's own type has no page


def _short(limit: object) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Pads cells to columns; every line has as many cells as the first."""
    return "\n".join(align_lines(lines, left=len(lines[0])))


def align_lines(lines: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Aligns line by line; only the first `left` columns are flush left."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    return [
        "  ".join(
            side(cell, width) for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    ]


def format_size(nbytes: float) -> str:
    """Formats bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def format_span(lo: int, hi: int) -> str:
    """Formats a range with both ends; "-" if empty (-1)."""
    return "-" if hi < 0 else f"{lo}..{hi}" if lo != hi else str(lo)
