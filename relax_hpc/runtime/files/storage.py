"""Retries file operations on flaky or full file systems, with a deadline.

A network file system answers ESTALE, EIO or ETIMEDOUT while a server is replaced; a full one
answers ENOSPC or EDQUOT until somebody frees space. A process that has called `settle` retries: the
former for a limited time, the latter without limit. Others, e.g. the command line, fail at once.

A retried operation must be harmless if done twice; docs/explanation/design-notes.md says why each
is.
"""

import errno
import logging
import math
import os
import pwd
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception
from tenacity.wait import wait_exponential_jitter

from relax_hpc.runtime import heartbeat

log = logging.getLogger(__name__)
T = TypeVar("T")

PASSING = (
    errno.ESTALE, errno.EIO, errno.ETIMEDOUT,
    errno.ENOTCONN, errno.ESHUTDOWN,  # Lustre, of a client that a server has shut out
    errno.ECOMM, errno.EREMOTEIO,  # BeeGFS, of a server that does not answer or was restarted
)  # fmt: skip
"""Errors that pass once a server is back."""
FULL = (errno.ENOSPC, errno.EDQUOT)
PATIENCE_S = 1800.0
"""Time limit until a process knows `launch.advanced.peer_timeout_s` of its run."""
RESERVE_BYTES = 1 << 20
DAMAGE_S = 120.0
"""A file whose reads fail with EIO for this many seconds counts as damaged, where another can
replace it: a bad sector fails for ever."""
_FIRST_S, _LONGEST_S = 0.05, 10.0
"""Shortest and longest time between two attempts."""
_TELL_S = 60.0


class _Terms:
    def __init__(self) -> None:
        self.patience_s = 0.0
        self.reserve: Path | None = None
        self.told_at = -_TELL_S
        self.lock = threading.Lock()


_terms = _Terms()


def settle(patience_s: float = PATIENCE_S, *, reserve: Path | None = None) -> None:
    """Makes this process retry storage errors; a second call replaces the settings.

    Args:
        patience_s: how long errors of `PASSING` are retried; 0 disables all retries, also for
            space.
        reserve: a file of `RESERVE_BYTES` that is freed once the file system is full, so that small
            records can be written. It is created if missing, given enough space.
    """
    _terms.patience_s = patience_s
    _terms.reserve, _terms.told_at = reserve, -_TELL_S
    restore_reserve()


def patiently(
    path: Path,
    call: Callable[[], T],
    *,
    errors: Collection[int] = PASSING + FULL,
    small: bool = False,
    damage_s: float = math.inf,
) -> T:
    """Retries a call until storage allows it. The call must be harmless if made twice.

    Args:
        path: named in the log.
        call: a system call; a failed one may have taken effect.
        errors: error numbers that may pass.
        small: may use the space of the reserve; others wait until that is whole again.
        damage_s: how long EIO may last at most.

    Raises:
        OSError: another error, or the time limit has passed.
    """
    try:
        return call()
    except OSError as error:
        wait = _Wait(path, errors, damage_s)
        if not _terms.patience_s or not wait.goes_on(error):
            raise
        note(path, error, wait.begun)

    def attempt() -> T:
        if not small and is_short():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return call()

    with heartbeat.hold():
        return Retrying(
            retry=retry_if_exception(wait.goes_on),
            wait=wait_exponential_jitter(initial=_FIRST_S, max=_LONGEST_S, jitter=_FIRST_S),
            before_sleep=wait.note,
            reraise=True,
        )(attempt)


class _Wait:
    def __init__(self, path: Path, errors: Collection[int], damage_s: float) -> None:
        self._path, self._errors, self._damage_s = path, errors, damage_s
        self.begun = time.monotonic()

    def goes_on(self, error: BaseException) -> bool:
        if not isinstance(error, OSError) or error.errno not in self._errors:
            return False
        limit_s = _terms.patience_s
        if error.errno == errno.EIO:
            limit_s = min(limit_s, self._damage_s)
        return error.errno in FULL or time.monotonic() - self.begun < limit_s

    def note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert isinstance(error, OSError)
        note(self._path, error, self.begun)


def note(path: Path, error: OSError, begun: float) -> None:
    """Frees the reserve if the file system is full, and logs the error once a minute.

    Args:
        begun: time.monotonic() at the first failure.
    """
    if error.errno in FULL:
        give_reserve_back()
    now = time.monotonic()
    if now - _terms.told_at < _TELL_S:
        return
    _terms.told_at = now
    log.warning(
        "%s (owner %s): %s; holding since %.0f s, nothing is lost: %s",
        path, _owner(path), error.strerror, now - begun,
        "make room or raise the quota" if error.errno in FULL else "asking again",
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    """Lists a folder, sorted; empty if there is none.

    `Path.glob` treats an unreadable folder as empty.
    """
    try:
        return sorted(path.name for path in patiently(folder, lambda: list(folder.iterdir())))
    except FileNotFoundError:
        return []


def exists(path: Path) -> bool:
    """Whether a path exists, following links.

    `Path.exists` raises passing errors, or, from Python 3.14 on, returns False for them.
    """
    try:
        patiently(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def delete(path: Path) -> None:
    patiently(path, lambda: path.unlink(missing_ok=True), small=True)


def delete_folder(folder: Path) -> None:
    """Deletes a folder and its contents, as far as possible."""
    try:
        patiently(folder, partial(shutil.rmtree, folder), small=True, damage_s=DAMAGE_S)
    except OSError:  # it is not there, or somebody holds a file of it open
        with suppress(OSError):  # Python 3.11 raises some all the same
            shutil.rmtree(folder, ignore_errors=True)


def move(source: Path, target: Path) -> None:
    """Renames a file or folder once, though the call may report a failure after taking effect."""

    def rename() -> None:
        if source.exists() or not target.exists():
            source.rename(target)

    patiently(target, rename, small=True)


def is_short() -> bool:
    """Whether the file system is full: a process of this run freed the reserve, and it cannot be
    remade."""
    try:
        is_whole = _terms.reserve is None or _terms.reserve.exists()
    except OSError:  # storage fails in another way, which says nothing of room
        return False
    return not is_whole and not restore_reserve()


def give_reserve_back() -> None:
    """Frees space for small records; all processes of the run see its absence."""
    if _terms.reserve is not None and _terms.patience_s:
        with suppress(OSError):
            _terms.reserve.unlink(missing_ok=True)


def restore_reserve() -> bool:
    """Tries to make the reserve whole, and returns whether it is."""
    reserve = _terms.reserve
    if reserve is None:
        return True
    draft = reserve.with_name(f".{reserve.name}.{uuid.uuid4().hex[:8]}.tmp")
    with _terms.lock:
        try:
            if reserve.exists():
                return True
            reserve.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(bytes(2 * RESERVE_BYTES))  # what is free without it is not enough
                file.flush()
                os.fsync(file.fileno())
                file.truncate(RESERVE_BYTES)
                os.fsync(file.fileno())
            draft.replace(reserve)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            return False
    return True


def _owner(path: Path) -> str:
    for place in (path, path.parent):
        with suppress(OSError, KeyError):
            return pwd.getpwuid(place.stat().st_uid).pw_name
    return str(os.geteuid())
