"""Runs a program and kills what it leaves behind: `python program_keeper.py OWNER_PID PROGRAM ...`

As a subreaper it becomes the parent of orphans below it, in whatever session. It kills them when
the program or its owner has ended, or at SIGUSR2, then exits as the program did. It imports only
the standard library, to start in milliseconds.
"""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
END = signal.SIGUSR2
"""Makes it kill the program and its descendants."""


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # The program is asked to end by the same signal to all of its group: it decides when.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(END, lambda *_: sys.exit())
    status: int = signal.SIGKILL
    try:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, END, 0, 0, 0)
        if os.getppid() != int(sys.argv[1]):  # it died before the call above
            sys.exit()
        own = os.getpid()
        program = os.fork()
        if program == 0:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _become(sys.argv[2:], own)
        while (ended := os.wait())[0] != program:
            pass
        status = ended[1]
    finally:
        signal.signal(END, signal.SIG_IGN)
        end_children()
        end_likewise(status)


def _become(argv: list[str], parent: int) -> NoReturn:
    if os.getppid() == parent:
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(1)


def end_children() -> None:
    """Kills children until there are none: grandchildren of a killed child become children."""
    with suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


def _children() -> list[int]:
    own = os.getpid()
    with suppress(OSError):  # not every kernel has it
        return [
            int(pid)
            for pid in Path(f"/proc/{own}/task/{own}/children").read_text(encoding="utf-8").split()
        ]
    every = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in every if _parent(pid) == own]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before may have anything in it


def end_likewise(status: int) -> None:
    """Ends as a process with this status from `os.wait` did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # nobody may say what SIGKILL does
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
