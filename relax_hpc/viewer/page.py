"""One HTML file that needs nothing besides itself: no network, no script of others."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

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
    solved_at: float
    """Reward from which on a response is right."""


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
    nonce = secrets.token_urlsafe(16)
    count = 0
    with written(target, "--out", replace=replace) as draft, draft.open("wb") as file:
        file.write(template.head(head, COLOURS, nonce).encode())
        is_full = False
        for group in groups:
            text = template.group(group, head.solved_at).encode()
            is_full = file.tell() + len(text) + _KEPT_BYTES > MAX_BYTES
            if is_full:
                break
            file.write(text)
            count += 1
        file.write(template.tail(count, is_full, MAX_BYTES, nonce).encode())
    return count


def tokens(them: Iterable[Token]) -> Markup:
    """The tokens of a text, escaped here: there are hundreds of thousands on a page."""
    return Markup("".join(map(_token, them)))


def _token(token: Token) -> str:
    title = f' title="{_facts(token)}"' if token.is_sampled else ""
    return f'<b class="{_classes(token)}"{title}>{escape(token.text)}</b>'


def _classes(token: Token) -> str:
    """Returns a letter for each way to colour, and the number of the colour."""
    numbers = {by[0]: colour(token, by) for by in COLOURS}
    return " ".join(f"{by}{number}" for by, number in numbers.items() if number is not None)


def _facts(token: Token) -> str:
    """Says what is known of a sampled token, when somebody points at it."""
    advantage = "" if token.advantage is None else f" A{token.advantage:+.3g}"
    return f"{token.logprob:.3g} v{token.version}{advantage}"


def worth(reward: float, solved_at: float) -> str:
    """The class of a reward."""
    return "right" if reward >= solved_at else "wrong" if reward <= 0 else "partly"


def kind(group: Group, solved_at: float) -> str:
    """Says whether all episodes of a prompt group are right, or all wrong."""
    found = {row.reward >= solved_at for row in group.rows}
    return "mixed" if len(found) > 1 else "right" if True in found else "wrong"


def _template() -> jinja2.environment.TemplateModule:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for of_ours in (tokens, worth, kind):
        environment.filters[of_ours.__name__] = of_ours
    return environment.get_template("page.html.j2").module
