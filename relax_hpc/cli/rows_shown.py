"""How far the decoding of media is: a bar on a terminal, elsewhere a line a minute."""

import time
from contextlib import ExitStack
from typing import Self

import typer

_EVERY_S = 60.0


class RowsShown:
    """Shows of how many rows media are decoded, once it is told so. A context manager."""

    def __init__(self) -> None:
        """Shows nothing yet."""
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
        """Shows that so many rows of all are done."""
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
            typer.echo(
                f"media of {done:,} of {total:,} rows are decoded, {left_min:.0f} min to go",
                err=True,
            )
