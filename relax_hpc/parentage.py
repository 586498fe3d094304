"""Tells Linux what to do with this process when its parent ends, and with orphans below it.

`engines/leash.py`, `environments/program_keeper.py` and `rewards/sandbox_stage.py` say it
themselves: they run as programs of their own, with the standard library alone.
"""

import ctypes
import os
import signal
from functools import cache

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Has this process sent a signal when its parent ends; 0 is none."""
    _prctl(_SET_PDEATHSIG, number)


def end_with(owner: int, number: int = signal.SIGKILL) -> None:
    """Does so if `owner`, which started this process, is its parent still; else ends it."""
    end_with_parent(number)
    if os.getppid() != owner:  # it ended before the call above
        os._exit(1)


def adopt_orphans() -> None:
    """Becomes the parent of what its children leave behind."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


@cache
def _libc() -> ctypes.CDLL:
    """Loaded once: who forks may have called one of these before, and do not load it in a child."""
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _libc().prctl(option, value, 0, 0, 0)
