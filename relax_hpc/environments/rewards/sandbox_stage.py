"""Sets the limits inside a sandbox, then runs a program.

`python sandbox_stage.py REQUEST REPLY`: file descriptors of a JSON request from `sandbox.run`, and
of a pipe. A byte on the pipe says that the limits are set. It runs as a script, without this
package.
"""

import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import site
import struct
import sys
import types
from typing import Any, BinaryIO

STARTED = b"\n"
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
_LENT = (
    "typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math",
    "random", "statistics", "itertools", "functools", "operator", "io", "sys", "json", "fractions",
    "time",
)  # fmt: skip
"""Modules whose names a program can use, as in its data sets' graders; later ones win."""
_DEPTH = 50_000
"""Recursion limit, as in those graders."""
_STACK = 100 << 20
"""Stack for that depth, part of which passes through C; the system reserves 128 MiB."""


_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Processor -> its number in linux/audit.h, and its column of system call numbers below."""
_CALLS = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "socketpair": (53, 199),
    "fcntl": (72, 25),
}  # fmt: skip
"""Calls that are refused in some cases."""
_REFUSED = {
    "fork": (57, 1079), "vfork": (58, 1071), "unshare": (272, 97), "setns": (308, 268),
    # Memory that no limit counts.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "inotify_init": (253, 1043), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "timer_create": (222, 107), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "landlock_create_ruleset": (444, 444),
    # Other processes, whom no filter binds, and the user's keys.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
"""Calls that no program needs; on aarch64, numbers from 1024 on are unused."""
_NEWEST = 467
"""The newest call of Linux 6.16; newer ones are refused."""
_UNIX, _SET_PIPE_SIZE = 1, 1031


def main(request_fd: int, reply_fd: int) -> None:
    with os.fdopen(request_fd, "rb") as file:
        request = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    _ask(libc, _SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:  # it died before the call above
        sys.exit("nobody asks any more")
    for name, value in request["limits"].items():
        _limit(getattr(resource, name), value)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))  # a program may ask for more itself
    _refuse_calls(libc, request["families"])
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
    """Runs the program; then calls its function or runs a test, if requested, and replies."""
    site.setquit()  # Python was started without site, which runs what packages ask it to
    sys.path += site.getsitepackages()
    is_script = not (request["function"] or request["test"])
    module = types.ModuleType("__main__" if is_script else "program")
    sys.modules[module.__name__], sys.argv = module, ["program.py"]
    sys.setrecursionlimit(_DEPTH)
    code = compile(request["program"], "program.py", "exec")
    lent = _lend(_names(code))
    exec(code, module.__dict__)
    if request["function"]:
        value = _function_of(module, request["function"])(*request["arguments"])
        reply.write(json.dumps({"value": value}, default=_plain).encode())
    elif request["test"]:
        test = compile(request["test"], "test.py", "exec")
        asked = _names(test)
        if lent & asked and not asked & vars(module).keys():
            return  # the answer would be a function of Python's, not the program's
        exec(test, module.__dict__)
        reply.write(request["token"].encode())


def _lend(asked: set[str]) -> set[str]:
    """Gives a program the names that graders import, and returns them.

    They are added to the builtins, so the program's own definitions win, and its lines, docstring
    and `from __future__` imports stay unchanged.
    """
    found = {name: importlib.import_module(name) for name in _LENT}
    lent = dict[str, Any]()
    for name, module in found.items():
        public = getattr(module, "__all__", [each for each in vars(module) if each[0] != "_"])
        lent |= {each: getattr(module, each) for each in public if name != "time"}
    if not asked.isdisjoint(("np", "numpy")):  # it takes long, and few systems have it
        with contextlib.suppress(ImportError):
            lent["np"] = lent["numpy"] = importlib.import_module("numpy")
    lent = {each: value for each, value in (lent | found).items() if not hasattr(builtins, each)}
    vars(builtins).update(lent)
    return {*lent}


def _names(code: types.CodeType) -> set[str]:
    inside = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(_names, inside))


def _function_of(module: types.ModuleType, name: str) -> Any:  # noqa: ANN401
    if hasattr(module, name) or not hasattr(module, "Solution"):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    return list(value) if hasattr(value, "__iter__") else float(value)  # type: ignore[arg-type]


def _refuse_calls(libc: ctypes.CDLL, families: list[int]) -> None:
    """Refuses, by a seccomp filter, starting processes, uncounted memory, looking into other
    processes, reading the user's keys, and sockets outside `families`.

    Resource limits count a user's processes, not a program's, and never root's. A filter has no
    such gaps, and is inherited by executed programs.
    """
    name = os.uname().machine
    if name not in _MACHINES:
        sys.exit(f"no sandbox for processors of the kind {name}; there is one for {[*_MACHINES]}")
    code = b"".join(struct.pack("HBBI", *each) for each in _filter(*_MACHINES[name], families))
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
    _ask(libc, _SET_NO_NEW_PRIVS, 1)
    _ask(libc, _SET_SECCOMP, _MODE_FILTER, program)


def _filter(audit: int, place: int, families: list[int]) -> list[tuple[int, int, int, int]]:
    """Returns BPF instructions: code, jump if true, jump if false, constant."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    number, architecture, first, second = 0, 4, 16, 24
    program = [
        (load, 0, 0, architecture),
        (equal, 1, 0, audit),
        (give, 0, 0, kill),
        (load, 0, 0, number),
        (at_least, 0, 1, _X32),
        (give, 0, 0, kill),
        (at_least, 0, 1, _NEWEST + 1),
        (give, 0, 0, refuse | errno.ENOSYS),
        (equal, 0, 1, _CALLS["clone3"][place]),  # libraries fall back on clone
        (give, 0, 0, refuse | errno.ENOSYS),
    ]
    for call in _REFUSED.values():
        program += [(equal, 0, 1, call[place]), (give, 0, 0, refuse | errno.EAGAIN)]

    def by_argument(call: str, argument: int, test: int, values: list[int], error: int) -> None:
        """Allows a call only if an argument is one of the values."""
        allowed = [each for value in values for each in ((test, 0, 1, value), (give, 0, 0, allow))]
        program.append((equal, 0, len(allowed) + 2, _CALLS[call][place]))
        program.extend([(load, 0, 0, argument), *allowed, (give, 0, 0, refuse | error)])

    by_argument("clone", first, any_bit, [_CLONE_THREAD], errno.EAGAIN)
    by_argument("socket", first, equal, families, errno.EAFNOSUPPORT)
    by_argument("socketpair", first, equal, [_UNIX], errno.EAFNOSUPPORT)
    return [
        *program,
        (equal, 0, 3, _CALLS["fcntl"][place]),
        (load, 0, 0, second),
        (equal, 0, 1, _SET_PIPE_SIZE),
        (give, 0, 0, refuse | errno.EPERM),
        (give, 0, 0, allow),
    ]


def _ask(libc: ctypes.CDLL, option: int, value: int, pointer: bytes | None = None) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), pointer, None, None):
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
