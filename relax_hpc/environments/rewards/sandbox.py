"""Runs model-written programs in a sandbox with limits.

With bubblewrap a program has its own namespaces for users, processes, network, IPC, host name and
cgroups. It sees only the system and Python, read-only, and its own /tmp in memory. `sandbox_stage`
sets the limits inside. With "limits" alone a program cannot use much or leave processes behind, but
may read and write whatever the user may.
"""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import psutil

from relax_hpc.environments.rewards.sandbox_stage import STARTED
from relax_hpc.errors import ConfigError, RelaxError, ends_of, show

Sandbox = Literal["bubblewrap", "limits"]

START_S = 20.0
"""Seconds for the sandbox to start; not counted as the program's."""
END_S = 2.0
"""Seconds for bubblewrap to exit after its contents were killed."""
_STAGE = Path(__file__).with_name("sandbox_stage.py")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gets the same score
    "PYTHONDONTWRITEBYTECODE": "1",
}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_MOST_THREADS, _MOST_FILES = 64, 64
_MOST_ENTRIES = 4096
"""Most files and folders in /tmp, which the size limit does not count."""
_LOOK_S = 0.1
"""Seconds between such counts."""
_PIECE = 1 << 16


class ProgramLimits(NamedTuple):
    deadline_s: float = 4.0
    """Wall time."""
    memory_bytes: int = 1 << 30
    """Address space."""
    disk_bytes: int = 64 << 20
    """Space in /tmp; with "limits", size of a file."""
    output_bytes: int = 4 << 20
    """More output ends the program."""


class Program(NamedTuple):
    """A program and its use."""

    text: str
    stdin: str = ""
    function: str = ""
    """Function, or method of a class Solution, to call after the text has run."""
    arguments: Sequence[Any] = ()
    test: str = ""
    """Lines to run after the text, such as assertions."""


class ProgramOutcome(NamedTuple):
    """The result of a program."""

    is_well: bool
    """Whether the program ended by itself, without an exception, within the limits."""
    output: str
    value: Any = None
    """JSON value that its function returned; None otherwise."""
    has_value: bool = False
    passed: bool = False
    """The test ran to its end."""


class SandboxError(RelaxError, RuntimeError):
    """There is no sandbox here. The message says why."""


def check_sandbox(sandbox: Sandbox) -> None:
    """Runs a one-line program.

    Raises:
        ConfigError: the sandbox does not work on this node.
    """
    try:
        said = run(Program("print(6 * 7)"), ProgramLimits(START_S), sandbox)
        reason = "" if said.output == "42\n" else f"a program printed {show(said.output)}"
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


def run(program: Program, limits: ProgramLimits, sandbox: Sandbox) -> ProgramOutcome:
    """Runs a program to its end, or kills it. Nothing of it remains afterwards.

    Raises:
        SandboxError: it could not be started.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="relax-program-"))
        place = _isolate(limits) if sandbox == "bubblewrap" else _open(folder)
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
                        "families": place.families,
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


class _Sandbox(NamedTuple):
    """The sandbox set-up of a program."""

    command: list[str]
    """Command line; the stage's file descriptors are appended."""
    home: str
    """The only writable folder."""
    parent: int
    """Process id of the parent, as the program sees it."""
    families: tuple[int, ...]
    """Allowed socket families; empty without a network, where the kernel would buffer unread
    data."""


def _open(folder: str) -> _Sandbox:
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    return _Sandbox([*_python(), str(_STAGE)], folder, os.getpid(), families)


def _isolate(limits: ProgramLimits) -> _Sandbox:
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
    return _Sandbox([*command, "--chdir", "/tmp", *_python(), stage], "/tmp", 1, ())


def _shows_home(folder: Path) -> bool:
    try:
        home = Path.home().resolve()
    except RuntimeError:  # of a user that the system does not know
        return False
    return home.is_relative_to(folder) or folder == home / ".local"


def _parts(prefix: Path) -> list[Path]:
    """Returns the parts of Python's prefix that the interpreter needs: all of it, unless that
    exposes a home directory."""
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
    """Returns our Python; in a virtual environment, its base."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.base_prefix, "bin", name)
    program = (own if own.exists() else Path(sys.executable)).resolve()
    return [str(program), "-S", "-s", "-P"]


def _limits(limits: ProgramLimits, sandbox: Sandbox) -> dict[str, int]:
    """Limits by their name in the module resource."""
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
    """Makes an in-memory file, positioned at its beginning."""
    file = os.fdopen(os.memfd_create("relax-program"), "w+b")
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _outcome(
    process: "subprocess.Popen[bytes]", reply: BinaryIO, limits: ProgramLimits, token: str
) -> ProgramOutcome:
    said = {"reply": bytearray(), "output": bytearray(), "error": bytearray()}
    ended = _read(process, reply, limits, said)
    if not said["reply"].startswith(STARTED):
        words = said["error"].decode(errors="replace").strip().splitlines()
        code = f"it ended with {process.returncode}" if ended else f"nothing in {START_S:g} s"
        raise SandboxError(ends_of(words[-1], 300) if words else code)
    replied = bytes(said["reply"][len(STARTED) :])
    has_value, value = False, None
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        value = json.loads(replied)["value"]
        has_value = True
    return ProgramOutcome(
        is_well=ended and process.returncode == 0,
        output=said["output"].decode(errors="replace"),
        value=value,
        has_value=has_value,
        passed=replied == token.encode(),
    )


def _read(
    process: "subprocess.Popen[bytes]",
    reply: BinaryIO,
    limits: ProgramLimits,
    said: dict[str, bytearray],
) -> bool:
    """Reads a program's replies and output into `said`; returns whether it ended within the
    limits."""
    assert process.stdout and process.stderr
    end, is_started = time.monotonic() + START_S, False
    with selectors.DefaultSelector() as selector:
        for name, pipe in zip(said, (reply, process.stdout, process.stderr), strict=True):
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, min(_LOOK_S, end - time.monotonic())))
            if not ready and time.monotonic() >= end:
                return False
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE)
                said[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
            if not is_started and said["reply"]:
                is_started, end = True, time.monotonic() + limits.deadline_s
            is_crowded = is_started and _has_too_many_files(process)  # before, it sees the node's
            if max(map(len, said.values())) > limits.output_bytes or is_crowded:
                return False
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _has_too_many_files(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a sandbox's /tmp has too many; a folder on disk is not counted. Bubblewrap keeps the
    pipes open as long as a program in it runs."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        [inside] = children.read_text(encoding="utf-8").split()
        found = os.statvfs(f"/proc/{inside}/root/tmp")
    except (OSError, ValueError):  # without a sandbox, or at its beginning or end
        return False
    return found.f_files - found.f_ffree > _MOST_ENTRIES


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills a running program and its sandbox."""
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
