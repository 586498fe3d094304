"""The same as the page, in a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from relax_hpc.viewer.asked import By
from relax_hpc.viewer.colours import COLOURS, Token, colour
from relax_hpc.viewer.groups import Group, Row


def show(console: Console, groups: Iterable[Group], by: By | None) -> int:
    """Prints prompt groups, siblings one below the other.

    Args:
        console: where to.
        groups: read one by one as they are printed.
        by: what colours the tokens; nothing if not given.

    Returns:
        Prompt groups printed.
    """

    def say(text: Text) -> None:
        console.print(text, soft_wrap=True)  # else lines are broken within words

    count = 0
    for group in groups:
        where = "not planned yet" if group.step is None else f"step {group.step}"
        title = f"prompt group {group.guid}, {where}, {group.mean}"
        say(Text(title, style="bold"))
        if group.note:
            say(Text(group.note, style="yellow"))
        for row in group.rows:
            if row.prompt:
                say(Text(row.prompt, style="dim"))
            say(Text(facts(row), style="cyan"))
            say(response(row, by))
        console.print()
        count += 1
    return count


def facts(row: Row) -> str:
    """The line above a response."""
    segment = f", segment {row.segment}" if row.segment else ""
    advantage = "" if row.advantage is None else f", advantage {row.advantage:+.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in row.parts.items())
    of = f" ({parts})" * bool(parts) + ", which failed" * row.failed
    return (
        f"sibling {row.sibling}{segment}: reward {row.reward:.4g}{of}{advantage}, {row.finish}, "
        f"versions {row.versions}, {row.prompt_len} + {row.response_len} tokens"
    )


def response(row: Row, by: By | None) -> Text:
    """The tokens of a response, coloured."""
    text = Text()
    for token in row.head:
        text.append(token.text, style(token, by))
    if row.left_out:
        text.append(f" [... {row.left_out} tokens ...] ", "dim italic")
    for token in row.tail:
        text.append(token.text, style(token, by))
    return text


def style(token: Token, by: By | None) -> str:
    """The style of a token in rich's words."""
    number = colour(token, by) if by else None
    return "" if by is None or number is None else f"black on {COLOURS[by][number].background}"
