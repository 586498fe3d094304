"""Where a process can die: the system calls by which the bus touches files, counted and named.

Installed in a process of its own. Before the nth call it kills itself with SIGKILL, or half way
through it: half of a write is done, any other call is done and nothing after it. Or it stops there,
to come back later as a zombie.
"""

import io
import os
import re
import signal
from pathlib import Path

from deaths import WRITES, half_of, open_file, real_open

from relax_hpc.bus import frames, log

CALLS = (
    "open", "mkdir", "pwrite", "pwritev", "write", "fsync", "fdatasync", "rename", "replace",
    "unlink", "ftruncate", "posix_fallocate",
)  # fmt: skip
SYNCS = ("fsync", "fdatasync")

_KINDS = [
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"bus/p/[^/]+/log", "log"),
        (r"bus/p/[^/]+/ballast", "ballast"),
        (r"bus/p/[^/]+", "own folder"),
        (r"bus/p/[^/]+/f\d+", "fence folder"),
        (r"bus/p/[^/]+/f\d+/\..*\.tmp", "draft"),
        (r"bus/p/[^/]+/f\d+/\d+\.h5", "shard"),
        (r"bus/plan/FENCE\.\d+", "claim"),
        (r"bus/plan/f\d+\.log", "plan"),
        (r"bus/plan/\.snap.*\.tmp", "snapshot draft"),
        (r"bus/plan/snap.*", "snapshot"),
        (r"bus/plan", "plan folder"),
        (r"bus/ctl/credits", "credits"),
        (r"bus/ctl", "folder of credits"),
        (r"bus/RUN\.json", "RUN.json"),
        (r"checkpoints/\..*\.tmp", "checkpoint draft"),
        (r"checkpoints/.*\.json", "checkpoint"),
        (r"checkpoints", "folder of checkpoints"),
    )
]


class Points:
    """Counts this process's calls on files below `root`, and acts at one of them.

    Args:
        root: of the world, symbolic links resolved.
        tell: is given the name of each call before it happens.
        halt: is called at a call whose mode is `halt`; it returns when the zombie goes on.
    """

    def __init__(self, root, tell, halt):
        self.stage, self.num_calls = "open", 0
        self._root, self._tell, self._halt = f"{root}/", tell, halt
        self._fate = (0, "")
        self._kill, self._pid = os.kill, os.getpid()
        self._readlink = os.readlink

    def install(self, fate):
        """Args:
        fate: (number of the call, counted from 1; mode)
        """
        self._fate = fate
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        io.open = open_file

    def _wrapped(self, name, real):
        def call(*args, **kwargs):
            path = self._path(name, args)
            if path is None:
                return real(*args, **kwargs)
            self.num_calls += 1
            self._tell(f"{self.stage}: {self._label(name, path, args)}")
            if name == "open" and len(args) > 1:
                args = (args[0], args[1] & ~os.O_DSYNC, *args[2:])  # only a power cut would tell
            if name in ("unlink", "rename") and path.endswith(".h5"):  # a rename: written over
                self._archive(path)
            if self.num_calls == self._fate[0]:
                self._meet_fate(name, real, args, kwargs)
            return None if name in SYNCS else real(*args, **kwargs)

        return call

    def _meet_fate(self, name, real, args, kwargs):
        mode = self._fate[1]
        if mode == "halt":
            self._halt()
            return
        if mode == "half":
            if name in WRITES:
                half_of(name, real, args)
            else:
                real(*args, **kwargs)
        self._kill(self._pid, signal.SIGKILL)

    def _path(self, name, args):
        """Below `root`; None if it is elsewhere."""
        path = args[0]
        if isinstance(path, int):
            path = self._readlink(f"/proc/self/fd/{path}")
        path = os.fspath(path).removeprefix(self._root)
        return path if path.startswith(("bus", "checkpoints")) else None

    def _label(self, name, path, args):
        if name in ("rename", "replace"):
            path = os.fspath(args[1]).removeprefix(self._root)
        kind = next((kind for pattern, kind in _KINDS if pattern.fullmatch(path)), path)
        if name in WRITES and kind in ("log", "plan"):
            kind = f"{kind} {content_of(kind, args[1])}"
        return f"{name.rstrip('v').replace('pwrite', 'write')} {kind}"

    def _archive(self, path):
        """Keeps what is deleted, so that the whole plan can be replayed in the end."""
        source, target = Path(self._root, path), Path(self._root, "archive", path)
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f"{target.name}.{self._pid}")
            with real_open(source, "rb") as old, real_open(draft, "wb") as kept:
                kept.write(old.read())
            draft.rename(target)  # whole or not at all: this process may be killed


def content_of(kind, data):
    """Names the kind of record that is being written."""
    data = b"".join(map(bytes, data)) if isinstance(data, list) else bytes(data)
    if kind == "log":
        record = log.unpack(data[-log.RECORD_BYTES :])
        cut = "CUT + " if len(data) > log.RECORD_BYTES else ""
        return f"{cut}{record.kind.name}" if record else "rest"
    records, _ = frames.decode(data, Path(kind))
    if not records:
        return "rest"
    record = records[-1]
    for key, what in (("keep", "header"), ("parts", "portion"), ("dropped", "drop")):
        if key in record:
            return what
    return "repetition"
