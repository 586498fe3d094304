"""One HTML file that needs nothing besides itself: no network, no script of others."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from relax_hpc.user_files import written
from relax_hpc.viewer.asked import By
from relax_hpc.viewer.colours import COLOURS, Token, colour
from relax_hpc.viewer.groups import Group

MAX_BYTES = 20_000_000
"""A page is not larger; a browser opens that at once."""
_KEPT_BYTES = 20_000
"""For the end of the page, and what is said there."""


class Head(NamedTuple):
    """The top of a page."""

    name: str
    """The run's."""
    by: By
    remarks: list[str]


def write(target: Path, head: Head, groups: Iterable[Group], *, replace: bool) -> int:
    """Writes a page, which appears when it is complete; it ends early rather than be too large.

    Args:
        target: the file.
        head: the top of it.
        groups: read one by one as they are written.
        replace: whether a page that is there makes room.

    Returns:
        Prompt groups on it.

    Raises:
        ConfigError: it cannot be written, or may not.
    """
    template: Any = _template()
    count = 0
    with written(target, "--out", replace=replace) as draft, draft.open("wb") as file:
        file.write(template.head(head, COLOURS, secrets.token_urlsafe(16)).encode())
        is_full = False
        for group in groups:
            text = template.group(group).encode()
            is_full = file.tell() + len(text) + _KEPT_BYTES > MAX_BYTES
            if is_full:
                break
            file.write(text)
            count += 1
        file.write(template.tail(count, is_full, MAX_BYTES).encode())
    return count


def classes(token: Token) -> str:
    """The classes of a token: a letter for each way to colour, and the number of the colour."""
    numbers = {by[0]: colour(token, by) for by in COLOURS}
    return " ".join(f"{by}{number}" for by, number in numbers.items() if number is not None)


def _template() -> jinja2.environment.TemplateModule:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["classes"] = classes
    return environment.get_template("page.html.j2").module
