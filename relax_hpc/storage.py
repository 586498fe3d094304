"""Storage that fails for a while: who waits for it, for how long, and what is told meanwhile.

A network file system answers ESTALE, EIO or ETIMEDOUT while a server is replaced; a full one, or
one whose quota is used up, answers ENOSPC or EDQUOT until somebody makes room. A process that has
called `settle` tries again: as long as it has patience, and as long as it takes where only room is
missing. Others, e.g. the command line, are told at once.

What is tried again has to be harmless if it is done twice; docs/architecture.md says why each is.
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

from relax_hpc import heartbeat

log = logging.getLogger(__name__)
T = TypeVar("T")

PASSING = (
    errno.ESTALE, errno.EIO, errno.ETIMEDOUT,
    errno.ENOTCONN, errno.ESHUTDOWN,  # Lustre, of a client that a server has shut out
    errno.ECOMM, errno.EREMOTEIO,  # BeeGFS, of a server that does not answer or was restarted
)  # fmt: skip
"""Errors that a server's return ends."""
FULL = (errno.ENOSPC, errno.EDQUOT)
PATIENCE_S = 1800.0
"""Patience of a process until it knows that of its run, `launch.peer_timeout_s`."""
RESERVE_BYTES = 1 << 20
DAMAGE_S = 120.0
"""Seconds after which a file whose reads end with EIO counts as damaged, where others can take its
place: a bad sector answers so for ever."""
_FIRST_S, _LONGEST_S = 0.05, 10.0
"""Shortest and longest time between two attempts."""
_TELL_S = 60.0


class _Terms:
    """The patience that this process has settled."""

    def __init__(self) -> None:
        self.patience_s = 0.0
        self.reserve: Path | None = None
        self.told_at = -_TELL_S
        self.lock = threading.Lock()


_terms = _Terms()


def settle(patience_s: float = PATIENCE_S, *, reserve: Path | None = None) -> None:
    """Makes this process patient with storage; calling it again replaces what was settled.

    Args:
        patience_s: how long errors of `PASSING` are waited out; 0: not at all, and nobody waits
            for room either.
        reserve: a file of `RESERVE_BYTES` that is given back once there is no room, so that small
            records can be written. It is made if it is not there and there is room.
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
    """Makes a call again until storage lets it. It must be harmless to make it twice.

    Args:
        path: what it is about, for the log.
        call: of the operating system; what went wrong may have happened all the same.
        errors: numbers of the errors that may pass.
        small: it may use the room of the reserve; else it waits until that is whole again.
        damage_s: how long EIO may last at most.

    Raises:
        OSError: of another kind, or patience is over.
    """
    try:
        return call()
    except OSError as error:
        wait = _Wait(path, errors, damage_s)
        if not _terms.patience_s or not wait.goes_on(error):
            raise
        wait.note(error)

    def attempt() -> T:
        if not small and is_short():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return call()

    with heartbeat.hold():
        return Retrying(
            retry=retry_if_exception(wait.goes_on),
            wait=wait_exponential_jitter(initial=_FIRST_S, max=_LONGEST_S, jitter=_FIRST_S),
            before_sleep=wait.note_attempt,
            reraise=True,
        )(attempt)


class _Wait:
    """The wait of one call for storage."""

    def __init__(self, path: Path, errors: Collection[int], damage_s: float) -> None:
        self._path, self._errors = path, errors
        self._begun = time.monotonic()
        self._damage_s = damage_s

    def goes_on(self, error: BaseException) -> bool:
        """Returns whether the call is to be made again after an error."""
        if not isinstance(error, OSError) or error.errno not in self._errors:
            return False
        limit_s = _terms.patience_s
        if error.errno == errno.EIO:
            limit_s = min(limit_s, self._damage_s)
        return error.errno in FULL or time.monotonic() - self._begun < limit_s

    def note_attempt(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert isinstance(error, OSError)
        self.note(error)

    def note(self, error: OSError) -> None:
        note(self._path, error, self._begun)


def note(path: Path, error: OSError, begun: float) -> None:
    """Makes room for small records if there is none, and says once a minute what is wrong.

    Args:
        path: what it is about.
        error: as the operating system told it.
        begun: time of `time.monotonic` since which somebody waits.
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
    """Lists a folder, sorted; nothing where there is none.

    `Path.glob` says of a folder that cannot be read that nothing is in it.
    """
    try:
        return sorted(path.name for path in patiently(folder, lambda: list(folder.iterdir())))
    except FileNotFoundError:
        return []


def exists(path: Path) -> bool:
    """Whether there is something of that name; of a link, what it leads to.

    `Path.exists` raises what may pass, or, from Python 3.14 on, says that nothing is there.
    """
    try:
        patiently(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def delete(path: Path) -> None:
    """Deletes a file, if it is there."""
    patiently(path, lambda: path.unlink(missing_ok=True), small=True)


def delete_folder(folder: Path) -> None:
    """Deletes a folder with all that is in it, as far as that can be."""
    try:
        patiently(folder, partial(shutil.rmtree, folder), small=True, damage_s=DAMAGE_S)
    except OSError:  # it is not there, or somebody holds a file of it open
        with suppress(OSError):  # Python 3.11 raises some all the same
            shutil.rmtree(folder, ignore_errors=True)


def move(source: Path, target: Path) -> None:
    """Gives a file or folder another name, once, though it may be told that this failed."""

    def rename() -> None:
        if source.exists() or not target.exists():
            source.rename(target)

    patiently(target, rename, small=True)


def is_short() -> bool:
    """Whether there is no room: a process of this run gave the reserve back, and there is too
    little to make it anew, which this tries."""
    try:
        is_whole = _terms.reserve is None or _terms.reserve.exists()
    except OSError:  # storage fails in another way, which says nothing of room
        return False
    return not is_whole and not restore_reserve()


def give_reserve_back() -> None:
    """Makes room for small records; all processes of the run see by it that there is none."""
    if _terms.reserve is not None and _terms.patience_s:
        with suppress(OSError):
            _terms.reserve.unlink(missing_ok=True)


def restore_reserve() -> bool:
    """Returns whether the reserve is whole, after an attempt to make it."""
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
