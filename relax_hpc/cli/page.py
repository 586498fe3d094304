"""docs/cli.md, made of the commands: `python -m relax_hpc.cli.page docs/cli.md`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from relax_hpc.cli.main import app

_HEAD = (
    "<!-- made by `make docs` of what the code declares; do not edit -->\n"
    "# Commands\n\n"
    "`relax-hpc -h` lists them, `relax-hpc COMMAND -h` has what stands here. RUN is the name of a "
    "run, from any folder, or its directory: `relax-hpc ls` shows yours. A shell completes names "
    "of runs after `relax-hpc --install-completion`.\n"
)


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_section(name, each) for name, each in _commands(_group(), ""))])


def _group() -> Any:  # noqa: ANN401
    return typer.main.get_command(app)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Every command of a group and of the groups in it, with its full name."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from _commands(each, f"{path}{name} ")
        else:
            yield f"{path}{name}", each


def _section(name: str, command: Any) -> str:  # noqa: ANN401
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([f"relax-hpc {name}", *(_argument(each) for each in arguments)])
    lines = [f"## {name}", "", f"`{usage}`: {_plain(command.help)}", ""]
    rows = [(_argument(each), each.help) for each in arguments]
    rows += [(", ".join([*each.opts, *each.secondary_opts]), each.help) for each in options]
    if rows:
        cells = (
            f"| `{left}` | {_plain(right).replace('|', chr(92) + '|')} |" for left, right in rows
        )
        lines += ["| | |", "|---|---|", *cells, ""]
    _, _, examples = (command.epilog or "").partition(":  ")
    lines += ["```", *(each.strip() for each in re.split(r"  \|  ", examples)), "```", ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:  # noqa: ANN401
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
