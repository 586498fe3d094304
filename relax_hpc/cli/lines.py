"""Says things in lines: results and remarks, errors of arguments, and progress."""

import os
import re
import time
from contextlib import ExitStack
from typing import Any, Literal, Self

import typer

from relax_hpc.errors import ConfigError, none_of
from relax_hpc.runtime.text import printable, wrong


def echo(said: object, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines, or a piece of one, with foreign control characters made visible."""
    typer.echo(printable(str(said)), err=err, nl=nl)


def echo_styled(said: object, style: str, *, err: bool = False) -> None:
    """Does as `echo`, in a style of rich; without one where NO_COLOR is set, in which rich alone
    would still print bold and dim."""
    from rich.console import Console
    from rich.text import Text

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(stderr=err, soft_wrap=True, color_system=colours)
    console.print(Text(printable(str(said)), style=style))


_LACKING = {
    "run": "which run? relax-hpc ls lists yours",
    "job": "which job? relax-hpc init NAME makes one to begin with",
}
"""Advice for a missing argument, by name."""


class PlainGroup(typer.core.TyperGroup):
    """Refuses arguments as a job's keys are refused: what, why, and what is allowed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Returns a command whose help is wrapped by the terminal alone, not by its docstring."""
        found = super().get_command(ctx, cmd_name)
        if found is not None and found.help:
            found.help = re.sub(r"(?<!\n)\n(?!\n)", " ", found.help)
        return found

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Raises:
        ConfigError: an argument of the command is wrong or missing.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise ConfigError(_line(error)) from None


def _line(error: typer.BadParameter) -> str:
    command = error.ctx.command_path if error.ctx else "relax-hpc"
    param: Any = error.param
    if param is None:
        return f"{command}: {error.message}"
    is_option = param.param_type_name == "option"
    name = max(param.opts, key=len) if is_option else str(param.name).upper()
    if type(error).__name__ == "MissingParameter":
        hint = _LACKING.get(str(param.name), f"{command} -h says what it takes")
        return f"{command}: lacks {name}; {hint}"
    value, why = _why(error)
    return f"{name} {value}".rstrip() + f": {why}; {command} -h says more"


def _why(error: typer.BadParameter) -> tuple[str, str]:
    """Returns the value, and what is wrong with it."""
    said = error.message.removeprefix("Value error, ").rstrip(".")
    if choices := re.fullmatch(r"'(.*?)' is not one of (.+)", said):
        return choices[1], none_of(choices[1], re.findall("'(.*?)'", choices[2]))
    items: list[Any] = getattr(error.__cause__, "errors", list)()
    return (str(items[0]["input"]), wrong(items[0])) if items else ("", said)


_EVERY_S = 60.0


class RowsShown:
    """Shows the progress of decoding media: a bar on a terminal, elsewhere a line a minute.

    A context manager.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._console, self._open = Console(stderr=True), ExitStack()
        self._bar = Progress(console=self._console, transient=True)
        self._rows = self._bar.add_task("decoding media of rows", total=None)
        self._begin = self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._begin:
            self._begin = self._said = now
            if self._console.is_terminal:
                self._open.enter_context(self._bar)
        self._bar.update(self._rows, completed=done, total=total)
        if done == total:
            self._open.close()
        elif done and now - self._said >= _EVERY_S and not self._console.is_terminal:
            self._said = now
            left_min = (now - self._begin) / done * (total - done) / 60
            echo(
                f"media of {done:,} of {total:,} rows are decoded, {left_min:.0f} min to go",
                err=True,
            )
