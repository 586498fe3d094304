"""Storage that says no for a while: errors at one system call, wherever that is made."""

import io
import os
import threading
from contextlib import contextmanager
from pathlib import Path

CALLS = (
    *("open", "read", "write", "pwrite", "pwritev", "preadv", "fsync", "rename", "replace", "link"),
    *("unlink", "mkdir", "listdir", "scandir", "stat", "fstat", "close"),
    "rmdir",
)
UNDONE, DONE, HALF = "undone", "done", "half"


class Faults:
    """Makes one system call on files below a folder fail: the nth, counted from 1.

    Args:
        how: whether what was asked for has happened all the same, or half of a write.
        in_any_thread: not in the main thread alone.
    """

    def __init__(self, root, nth, code, how, *, in_any_thread=False):
        self._root, self._nth, self._code, self._how = str(root), nth, code, how
        self._in_any_thread = in_any_thread
        self.count, self.call = 0, None

    def wrapped(self, name, real):
        def call(*args, **kwargs):
            is_main = threading.current_thread() is threading.main_thread()
            if not (is_main or self._in_any_thread) or self._elsewhere(args):
                return real(*args, **kwargs)
            self.count += 1
            if self.count != self._nth:
                return real(*args, **kwargs)
            self.call, path = name, self._path(args)
            result = self._half(name, real, args) if self._how == HALF else None
            if self._how == DONE or name == "close":  # a descriptor is gone, error or not
                result = real(*args, **kwargs)
            if name == "open" and result is not None:
                result.close() if hasattr(result, "close") else os.close(result)
            raise OSError(self._code, os.strerror(self._code), path)

        return call

    @staticmethod
    def _half(name, real, args):
        if name == "pwritev":
            real(args[0], [b"".join(args[1])[:100]], args[2])
        elif name in ("write", "pwrite"):
            real(args[0], args[1][: len(args[1]) // 2], *args[2:])

    def _path(self, args):
        path = args[0] if args else "."
        return os.fspath(
            Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else path
        )

    def _elsewhere(self, args):
        try:
            path = self._path(args)
        except OSError:
            return True
        return path != self._root and not os.fsdecode(path).startswith(f"{self._root}/")


@contextmanager
def failing(monkeypatch, root, nth, code, how, *, in_any_thread=False):
    faults = Faults(root, nth, code, how, in_any_thread=in_any_thread)
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, faults.wrapped(name, getattr(os, name)))
        patch.setattr(io, "open", faults.wrapped("open", io.open))  # of pathlib
        yield faults
