"""Ties a program to its owner: `python leash.py OWNER_PID PROGRAM ARGUMENTS...`

The kernel kills the program when its owner dies, however it dies. Run as a program of its own
between fork and exec, since code in a forked child of a threaded process can deadlock. It imports
the standard library only, so it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    owner = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it died before the call above
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
