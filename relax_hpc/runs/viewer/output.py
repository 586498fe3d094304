"""Shows prompt groups: on a self-contained HTML page (no network, no external scripts), or in a
terminal."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape
from rich.console import Console
from rich.text import Text

from relax_hpc.runs.answers import in_words
from relax_hpc.runs.viewer import By
from relax_hpc.runs.viewer.run import GroupView, RowView, facts
from relax_hpc.runs.viewer.words import COLOURS, Token, colour
from relax_hpc.runtime.files.records import compact
from relax_hpc.runtime.files.user_files import write_named
from relax_hpc.runtime.text import printable

MAX_BYTES = 20_000_000
"""Largest page; a browser opens it at once."""
_KEPT_BYTES = 20_000
"""Reserve for the end of the page and its remarks."""


class PageHeader(NamedTuple):
    name: str
    by: By
    remarks: list[str]
    solved_at: float
    """Reward from which on a response is right."""


def write(target: Path, head: PageHeader, groups: Iterable[GroupView], *, in_run: bool) -> int:
    """Writes a page atomically; ends early rather than exceed the size limit.

    Args:
        groups: read one by one while writing.
        in_run: it is the page of this user's own run, and replaces an older one.

    Returns:
        Number of prompt groups on it.

    Raises:
        ConfigError: it cannot be written, or may not.
    """
    template: Any = _template()
    nonce = secrets.token_urlsafe(16)
    count = 0
    with write_named(target, "--out", replace=in_run, in_run=in_run) as file:
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
    """Renders tokens, with escaping here: a page has hundreds of thousands."""
    return Markup("".join(map(_token, them)))


def _token(token: Token) -> str:
    title = f' title="{_facts(token)}"' if token.is_sampled else ""
    return f'<b class="{_classes(token)}"{title}>{escape(token.text)}</b>'


def _classes(token: Token) -> str:
    """CSS classes: a letter per colouring, and the number of the colour."""
    numbers = {by[0]: colour(token, by) for by in COLOURS}
    return " ".join(f"{by}{number}" for by, number in numbers.items() if number is not None)


def _facts(token: Token) -> str:
    """Tooltip of a sampled token."""
    advantage = "" if token.advantage is None else f" A{token.advantage:+.3g}"
    return f"{token.logprob:.3g} v{token.version}{advantage}"


def worth(reward: float, solved_at: float) -> str:
    """CSS class of a reward."""
    return "right" if reward >= solved_at else "wrong" if reward <= 0 else "partly"


def kind(group: GroupView, solved_at: float) -> str:
    """Whether all episodes of a prompt group are right, or all wrong."""
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
    for of_ours in (tokens, worth, kind, in_words, compact):
        environment.filters[of_ours.__name__] = of_ours
    return environment.get_template("page.html.j2").module


def show(console: Console, groups: Iterable[GroupView], by: By | None) -> int:
    """Prints prompt groups, siblings one below the other.

    Args:
        groups: read one by one while printing.
        by: meaning of the tokens' colours; None prints without.

    Returns:
        Number of prompt groups printed.
    """

    def say(text: Text) -> None:
        console.print(text, soft_wrap=True)  # else lines are broken within words

    count = 0
    for group in groups:
        where = "not planned yet" if group.step is None else f"step {group.step}"
        title = f"prompt group {group.guid}, {where}, {group.mean}"
        say(Text(title, style="bold"))
        if group.note:
            say(Text(printable(group.note), style="yellow"))
        for name, said in in_words(group.data_row).items():
            say(Text(f"{name}: {said}", style="green"))
        for row in group.rows:
            if row.prompt:
                say(Text(row.prompt, style="dim"))
            say(Text(printable(facts(row)), style="cyan"))
            say(response(row, by))
        console.print()
        count += 1
    return count


def response(row: RowView, by: By | None) -> Text:
    text = Text()
    for token in row.head:
        text.append(token.text, style(token, by))
    if row.left_out:
        text.append(f" [... {row.left_out} tokens ...] ", "dim italic")
    for token in row.tail:
        text.append(token.text, style(token, by))
    return text


def style(token: Token, by: By | None) -> str:
    """Returns the style of a token for rich."""
    number = colour(token, by) if by else None
    return "" if by is None or number is None else f"black on {COLOURS[by][number].background}"
