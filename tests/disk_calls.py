"""The calls whose order decides what a power cut leaves, as they are made."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_WRITES = ("write", "pwrite", "pwritev")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Fills a list, repetitions left out, with lines like

        create log, O_DSYNC | open log, O_DSYNC | write log | flush log | flush folder/
        make folder/ | rename draft -> record.json | link draft -> record.json | delete log

    What Python writes through a buffer of its own shows at the flush: of a file in which nothing
    has arrived yet it says `flush nothing of`.
    """
    calls: list[str] = []

    def note(line: str) -> None:
        if calls[-1:] != [line]:
            calls.append(line)

    def wrapped(name: str, tell):
        real = getattr(os, name)

        def call(*args, **kwargs):
            told = tell(name, args)
            result = real(*args, **kwargs)
            if told:
                note(told)
            return result

        return mock.patch.object(os, name, call)

    with (
        wrapped("open", _opening),
        wrapped("mkdir", lambda _, args: f"make {_name(args[0])}/"),
        wrapped("fsync", lambda _, args: _flush(args[0])),
        wrapped("unlink", lambda _, args: f"delete {_name(args[0])}"),
        wrapped("rename", _moving),
        wrapped("replace", _moving),
        wrapped("link", _moving),
        wrapped(_WRITES[0], _writing),
        wrapped(_WRITES[1], _writing),
        wrapped(_WRITES[2], _writing),
    ):
        yield calls


def _name(file: "int | str | os.PathLike[str]") -> str:
    path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(file)
    is_draft = path.name.startswith(".") and path.name.endswith((".tmp", ".draft"))
    return "draft" if is_draft else path.name


def _opening(_: str, args: tuple) -> str | None:
    path, flags = args[0], args[1]
    makes = flags & os.O_CREAT and not Path(path).exists()
    durable = ", O_DSYNC" if flags & os.O_DSYNC == os.O_DSYNC else ""
    if _name(path) == "draft" or not (makes or durable):
        return None
    return f"{'create' if makes else 'open'} {_name(path)}{durable}"


def _flush(fd: int) -> str:
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        return f"flush {_name(fd)}/"
    return f"flush {'' if found.st_size else 'nothing of '}{_name(fd)}"


def _moving(name: str, args: tuple) -> str:
    return f"{name.replace('replace', 'rename')} {_name(args[0])} -> {_name(args[1])}"


def _writing(_: str, args: tuple) -> str | None:
    return f"write {_name(args[0])}" if stat.S_ISREG(os.fstat(args[0]).st_mode) else None
