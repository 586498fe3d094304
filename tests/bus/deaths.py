"""A process that dies at a system call, within the process that tests."""

import _pyio
import io
import os
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

CALLS = (
    "open", "mkdir", "pwrite", "pwritev", "write", "fsync", "rename", "replace", "unlink",
)  # fmt: skip
WRITES = ("pwrite", "pwritev", "write")
real_open = io.open


class Killed(BaseException):
    """Not an Exception, so that nothing cleans up, as nothing does after a SIGKILL."""


@contextmanager
def death(nth):
    """At the nth system call that opens or changes a file; a write gets half way. 0 is never."""
    calls = 0

    def deadly(name, real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth and name in WRITES:
                half_of(name, real, args)
            if calls >= nth:  # and stays dead: whoever runs on meets it again
                raise Killed(name)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        if nth:
            stack.enter_context(patch.object(io, "open", open_file))
        for name in CALLS if nth else ():
            stack.enter_context(patch.object(os, name, deadly(name, getattr(os, name))))
        yield


def half_of(name, real, args):
    buffers = args[1] if name == "pwritev" else [args[1]]
    data = b"".join(bytes(buffer) for buffer in buffers)
    half = data[: len(data) // 2]
    real(args[0], [half] if name == "pwritev" else half, *args[2:])


def open_file(path, mode="r", *args, **kwargs):
    """`io.open`, but writes go through `os`, so that those calls count, too."""
    if "r" in mode and "+" not in mode:
        return real_open(path, mode, *args, **kwargs)
    return _pyio.open(os.fspath(path), mode, *args, **kwargs)


def deaths(monkeypatch):
    """Yields (number, context of the death at that call) until a life ends without one."""
    monkeypatch.setattr("relax_hpc.bus.log.BALLAST_BYTES", 16)
    nth, lives = 0, []

    @contextmanager
    def life(nth):
        try:
            with death(nth):
                yield
            lives.append(nth)
        except Killed:
            pass

    while not lives:
        nth += 1
        yield nth, life(nth)
