"""Runs programs that a model has written, where they reach nothing and cost little.

With bubblewrap a program has its own namespaces for users, processes, network, IPC, host name and
cgroups: it sees the system and Python, read-only, and a /tmp of its own in memory, and that is all.
Limits are taken inside by `sandbox_stage`. With "limits" alone a program is kept from taking much,
and from leaving processes behind; it may read and write whatever the user may.
"""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import psutil

from relax_hpc.errors import ConfigError, RelaxError, shown
from relax_hpc.rewards.sandbox_stage import STARTED

Sandbox = Literal["bubblewrap", "limits"]

START_S = 20.0
"""Time for the sandbox to be there; it does not count as the program's."""
END_S = 2.0
"""Time for bubblewrap to end once what is inside has been killed."""
_STAGE = Path(__file__).with_name("sandbox_stage.py")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gets the same score
    "PYTHONDONTWRITEBYTECODE": "1",
}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_MOST_THREADS, _MOST_FILES = 64, 64
_PIECE = 1 << 16


class Limits(NamedTuple):
    """The limits of one run of a program."""

    deadline_s: float = 4.0
    """Wall time."""
    memory_bytes: int = 1 << 30
    """Address space."""
    disk_bytes: int = 64 << 20
    """Space in /tmp; with "limits", of a file."""
    output_bytes: int = 4 << 20
    """Output after which the program is ended."""


class Program(NamedTuple):
    """A program and what is to be done with it."""

    text: str
    stdin: str = ""
    function: str = ""
    """Function to be called, or method of a class Solution; with it, the text is only defined."""
    arguments: Sequence[Any] = ()
    test: str = ""
    """Lines to be run behind it, as assertions; with them, the text is only defined."""


class Outcome(NamedTuple):
    """The end of a program."""

    is_well: bool
    """It ended by itself, without an exception, within the limits."""
    output: str
    """Text that it printed."""
    value: Any = None
    """Value that its function returned, as far as JSON tells; None if it did not."""
    has_value: bool = False
    passed: bool = False
    """The test came to its end."""


class SandboxError(RelaxError, RuntimeError):
    """There is no sandbox here. The message says why."""


def check_sandbox(sandbox: Sandbox) -> None:
    """Runs a program of one line.

    Raises:
        ConfigError: the sandbox does not work on this node.
    """
    try:
        said = run(Program("print(6 * 7)"), Limits(START_S), sandbox)
        reason = "" if said.output == "42\n" else f"a program printed {shown(said.output)}"
    except SandboxError as error:
        reason = str(error)
    if reason and sandbox == "limits":
        raise ConfigError(f'sandbox = "limits": {reason}')
    if reason:
        raise ConfigError(
            f'sandbox = "bubblewrap": {reason}; have the package bubblewrap (0.7 or newer) '
            "installed and user namespaces allowed on the nodes, score by a service (remote), or "
            'write sandbox = "limits" to run the programs of the model with your own rights'
        )


def run(program: Program, limits: Limits, sandbox: Sandbox) -> Outcome:
    """Runs a program to its end, or ends it. Nothing of it is left when this returns.

    Raises:
        SandboxError: it could not be started.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="relax-program-"))
        place = _isolated(limits) if sandbox == "bubblewrap" else _open(folder)
        asked = opened.enter_context(
            _memory(
                json.dumps(
                    {
                        "program": program.text,
                        "function": program.function,
                        "arguments": list(program.arguments),
                        "test": program.test,
                        "token": token,
                        "parent": place.parent,
                        "limits": _limits(limits, sandbox),
                    }
                )
            )
        )
        stdin = opened.enter_context(_memory(program.stdin))
        ends = os.pipe()
        reply = opened.enter_context(os.fdopen(ends[0], "rb"))
        reply_end = opened.enter_context(os.fdopen(ends[1], "wb"))
        descriptors = (asked.fileno(), reply_end.fileno())
        process = subprocess.Popen(
            [*place.command, *map(str, descriptors)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            env=_ENVIRONMENT | {"HOME": place.home, "TMPDIR": place.home},
            cwd=folder,
            start_new_session=True,
        )
        opened.enter_context(process)
        opened.callback(_end, process)
        reply_end.close()
        return _outcome(process, reply, limits, token)


class _Place(NamedTuple):
    """The place where a program is run."""

    command: list[str]
    """Command line, to which the stage's file descriptors are added."""
    home: str
    """The folder that it may write to."""
    parent: int
    """Process id of the parent, as the program sees it."""


def _open(folder: str) -> _Place:
    return _Place([*_python(), str(_STAGE)], folder, os.getpid())


def _isolated(limits: Limits) -> _Place:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("there is no program bwrap on this node")
    stage, prefix = "/relax_stage.py", Path(sys.base_prefix).resolve()
    command = [bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += [f"--unshare-{each}" for each in ("user", "pid", "net", "ipc", "uts", "cgroup")]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(limits.disk_bytes), "--tmpfs", "/tmp", *_system()]
    if not prefix.is_relative_to("/usr"):
        for each in _parts(prefix):
            command += ["--ro-bind", str(each), str(each)]
    command += ["--ro-bind", str(_STAGE), stage, "--remount-ro", "/proc"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return _Place([*command, "--chdir", "/tmp", *_python(), stage], "/tmp", 1)


def _shows_home(folder: Path) -> bool:
    try:
        home = Path.home().resolve()
    except RuntimeError:  # of a user that the system does not know
        return False
    return home.is_relative_to(folder) or folder == home / ".local"


def _parts(prefix: Path) -> list[Path]:
    """Returns what of the folder that Python is installed in its interpreter needs: all of it,
    unless that shows a home."""
    if not _shows_home(prefix):
        return [prefix]
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = [path for lib in ("lib", "lib64") for path in prefix.glob(f"{lib}/libpython*")]
    found += [path for lib in ("lib", "lib64") if (path := prefix / lib / name).is_dir()]
    return [Path(_python()[0]), *found]


def _system() -> Iterator[str]:
    yield from (
        "--ro-bind",
        "/usr",
        "/usr",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    )
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            yield from ("--symlink", str(folder.readlink()), str(folder))
        elif folder.is_dir():
            yield from ("--ro-bind", str(folder), str(folder))


def _python() -> list[str]:
    """Returns the Python that we run on; in a virtual environment, the one that it was made of."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.base_prefix, "bin", name)
    program = (own if own.exists() else Path(sys.executable)).resolve()
    return [str(program), "-S", "-s", "-P"]


def _limits(limits: Limits, sandbox: Sandbox) -> dict[str, int]:
    """Names of limits in the module resource -> values."""
    values = {
        "RLIMIT_CPU": int(limits.deadline_s) + 2,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_NOFILE": _MOST_FILES,
        "RLIMIT_CORE": 0,
    }
    # It counts the threads of a user, who outside of a namespace has others.
    return values | ({"RLIMIT_NPROC": _MOST_THREADS} if sandbox == "bubblewrap" else {})


def _memory(text: str) -> BinaryIO:
    """A file that is in memory alone, to be read from the beginning."""
    file = os.fdopen(os.memfd_create("relax-program"), "w+b")
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _outcome(
    process: "subprocess.Popen[bytes]", reply: BinaryIO, limits: Limits, token: str
) -> Outcome:
    said = {"reply": bytearray(), "output": bytearray(), "error": bytearray()}
    ended = _read(process, reply, limits, said)
    if not said["reply"].startswith(STARTED):
        words = said["error"].decode(errors="replace").strip().splitlines()
        code = f"it ended with {process.returncode}" if ended else f"nothing in {START_S:g} s"
        raise SandboxError(words[-1][:300] if words else code)
    replied = bytes(said["reply"][len(STARTED) :])
    has_value, value = False, None
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        value = json.loads(replied)["value"]
        has_value = True
    return Outcome(
        is_well=ended and process.returncode == 0,
        output=said["output"].decode(errors="replace"),
        value=value,
        has_value=has_value,
        passed=replied == token.encode(),
    )


def _read(
    process: "subprocess.Popen[bytes]", reply: BinaryIO, limits: Limits, said: dict[str, bytearray]
) -> bool:
    """Reads into `said` what a program replies and prints; whether it ended in time and bounds."""
    assert process.stdout and process.stderr
    end, is_started = time.monotonic() + START_S, False
    with selectors.DefaultSelector() as selector:
        for name, pipe in zip(said, (reply, process.stdout, process.stderr), strict=True):
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready and time.monotonic() >= end:
                return False
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE)
                said[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
            if not is_started and said["reply"]:
                is_started, end = True, time.monotonic() + limits.deadline_s
            if max(map(len, said.values())) > limits.output_bytes:
                return False
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills a program that has not ended, with all that is in its sandbox."""
    if process.poll() is not None:
        return
    inside = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        inside = psutil.Process(process.pid).children()  # the first in there: all die with it
    for each in inside:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    if inside:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    process.kill()
    process.wait()
