"""Text that others have written, as a terminal may print it."""

import re
import shlex

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Controls, which would act on a terminal, and those that turn the direction of the text."""


def printable(text: str) -> str:
    """Returns the text with a picture in place of what would not be seen, but act."""
    return _UNPRINTABLE.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def argument(path: object) -> str:
    """Returns a path as it is typed into a shell: in quotes, if it has a space, say."""
    return shlex.quote(str(path))
