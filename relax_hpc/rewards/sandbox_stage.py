"""First program inside a sandbox: takes the limits, one by one, then runs somebody's program.

`python sandbox_stage.py REQUEST REPLY`: file descriptors of a request in JSON, as `sandbox.run`
writes it, and of a pipe. A byte on the pipe says that the limits are taken. It runs as a script,
with nothing of this package in reach.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import site
import struct
import sys
import types
from typing import Any, BinaryIO, NamedTuple

STARTED = b"\n"
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2
_CLONE_THREAD = 0x10000
_X32 = 0x40000000


class _Machine(NamedTuple):
    """The system calls of a processor that a program is not to use."""

    audit: int
    """Number of the architecture in linux/audit.h."""
    clone: int
    """Allowed for threads."""
    clone3: int
    """Says that it is not there, so that libraries fall back on `clone`."""
    refused: tuple[int, ...]
    """fork, vfork; unshare, setns; memfd_create, shmget, msgget; io_uring_setup; add_key,
    request_key, keyctl."""


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 435, (57, 58, 272, 308, 319, 29, 68, 425, 248, 249, 250)),
    "aarch64": _Machine(0xC00000B7, 220, 435, (97, 268, 279, 194, 186, 425, 217, 218, 219)),
}


def main(request_fd: int, reply_fd: int) -> None:
    with os.fdopen(request_fd, "rb") as file:
        request = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    _ask(libc, _SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:  # it died before the call above
        sys.exit("nobody asks any more")
    for name, value in request["limits"].items():
        _limit(getattr(resource, name), value)
    _refuse_calls(libc)
    reply = os.fdopen(reply_fd, "wb", buffering=0)
    reply.write(STARTED)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    _run(request, reply)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _run(request: dict[str, Any], reply: BinaryIO) -> None:
    """Runs the program; then, if asked to, calls its function or runs a test in it, and replies."""
    site.setquit()  # Python was started without site, which runs what packages ask it to
    sys.path += site.getsitepackages()
    is_script = not (request["function"] or request["test"])
    module = types.ModuleType("__main__" if is_script else "program")
    sys.modules[module.__name__], sys.argv = module, ["program.py"]
    exec(compile(request["program"], "program.py", "exec"), module.__dict__)
    if request["function"]:
        value = _function_of(module, request["function"])(*request["arguments"])
        reply.write(json.dumps({"value": value}, default=_plain).encode())
    elif request["test"]:
        exec(compile(request["test"], "test.py", "exec"), module.__dict__)
        reply.write(request["token"].encode())


def _function_of(module: types.ModuleType, name: str) -> Any:  # noqa: ANN401
    """Returns a function of the program, or a method of its class Solution."""
    if hasattr(module, name) or not hasattr(module, "Solution"):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    return list(value) if hasattr(value, "__iter__") else float(value)  # type: ignore[arg-type]


def _refuse_calls(libc: ctypes.CDLL) -> None:
    """Refuses, by a seccomp filter, what starts processes, takes memory that no limit counts, or
    reads the user's keys.

    Limits count processes of a user, not of a program, and none of root's; a filter has no such
    holes, and is inherited by whatever the program executes.
    """
    name = os.uname().machine
    if name not in _MACHINES:
        sys.exit(f"no sandbox for processors of the kind {name}; there is one for {[*_MACHINES]}")
    code = b"".join(struct.pack("HBBI", *each) for each in _filter(_MACHINES[name]))
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
    _ask(libc, _SET_NO_NEW_PRIVS, 1)
    _ask(libc, _SET_SECCOMP, _MODE_FILTER, program)


def _filter(machine: _Machine) -> list[tuple[int, int, int, int]]:
    """Returns instructions: code, jump if true, jump if false, constant."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    number, architecture, flags = 0, 4, 16
    refused = [(each, errno.EAGAIN) for each in machine.refused]
    program = [
        (load, 0, 0, architecture),
        (equal, 1, 0, machine.audit),
        (give, 0, 0, kill),
        (load, 0, 0, number),
        (at_least, 0, 1, _X32),
        (give, 0, 0, kill),
    ]
    for call, error in [*refused, (machine.clone3, errno.ENOSYS)]:
        program += [(equal, 0, 1, call), (give, 0, 0, refuse | error)]
    return [
        *program,
        (equal, 0, 3, machine.clone),
        (load, 0, 0, flags),
        (any_bit, 1, 0, _CLONE_THREAD),
        (give, 0, 0, refuse | errno.EAGAIN),
        (give, 0, 0, allow),
    ]


def _ask(libc: ctypes.CDLL, option: int, value: int, pointer: bytes | None = None) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), pointer, None, None):
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
