"""Files that a user named. What cannot be read or written is refused in one line; nothing waits.

Among them are programs: a place in one is "file.py:name" or "package.module:name".
"""

import errno
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import stat
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from relax_hpc.errors import ConfigError, type_and_line
from relax_hpc.storage import patiently

log = logging.getLogger(__name__)

IMPORT_S = 120.0
"""Seconds that the import of a program may take."""
_TELL_S = 10.0
_KINDS = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}
_FORMATS = {
    b"\x1f\x8b": "is compressed (gzip), unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd), unpack it",
    b"BZh": "is compressed (bzip2), unpack it",
    b"\xfd7zXZ": "is compressed (xz), unpack it",
    b"PK\x03\x04": "is a zip archive, unpack it",
    b"\xff\xfe": "is UTF-16 text, save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text, save it as UTF-8",
    b"PAR1": "is Parquet",
}
ORIGIN = ".origin"
"""Name of a file beside the copy of a program, which says the path of what was copied."""
HUB = "hf:"
"""Begin of the name of a data set of the Hugging Face hub, where a path could stand."""
_PACKAGE = Path(__file__).parent
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def opened(path: Path, remedy: str) -> BinaryIO:
    """Opens a regular file.

    Args:
        path: of the file.
        remedy: what to do if it cannot be used, e.g. "name a TOML file".

    Raises:
        ConfigError: missing, not to be read, a folder, a pipe, a socket or a device.
    """
    try:
        # A pipe is opened only to be refused: that must not wait for who writes to it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = patiently(path, lambda: os.open(path, flags))
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error, remedy) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise ConfigError(f"{path}: {_KINDS.get(kind, 'is no file')}; {remedy}")
    return os.fdopen(descriptor, "rb")


def opened_text(path: Path, remedy: str) -> BinaryIO:
    """Opens a file of text, behind its byte order mark if it has one.

    Raises:
        ConfigError: as `opened`, or its first bytes are those of something else.
    """
    file = opened(path, remedy)
    try:
        head = file.read(8)
    except OSError as error:
        file.close()
        raise _unreadable(str(path), error, remedy) from None
    for magic, said in _FORMATS.items():
        if head.startswith(magic):
            file.close()
            raise ConfigError(f"{path}: {said}; {remedy}")
    file.seek(len(_BOM) if head.startswith(_BOM) else 0)
    return file


def read_text(path: Path, remedy: str) -> str:
    """All of a file of UTF-8 text.

    Raises:
        ConfigError: as `opened_text`, or not UTF-8.
    """
    with opened_text(path, remedy) as file:
        try:
            return file.read().decode()
        except OSError as error:
            raise _unreadable(str(path), error, remedy) from None
        except UnicodeDecodeError as error:
            said = f"is not UTF-8 text ({error.reason})"
            raise ConfigError(f"{path}: {said}; {remedy}") from None


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        ConfigError: as `read_text`, or it does not.
    """
    return parse_object(str(path), read_text(path, remedy), remedy)


def parse_object(where: str, text: str, remedy: str) -> dict[str, Any]:
    """A JSON object.

    Args:
        where: what to call it in messages.
        text: of it.
        remedy: what to do if it is something else.

    Raises:
        ConfigError: it is; or it has half of a surrogate pair, which is no text.
    """
    try:
        found = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(
            f"{where}: has {half}, half of a character; write the character, or both halves"
        ) from None
    except RecursionError:
        raise ConfigError(f"{where}: is nested too deeply; {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}; {remedy}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: is not an object; {remedy}")
    return found


def check_folder(where: str, path: Path, remedy: str) -> None:
    """Checks that a folder can be listed and entered.

    Args:
        where: what to call it in messages.
        path: of it.
        remedy: what to do if it cannot.

    Raises:
        ConfigError: it cannot, or there is none.
    """
    try:
        next(path.iterdir(), None)
        (path / ".").stat()
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such folder; {remedy}") from None
    except NotADirectoryError:
        raise ConfigError(f"{where}: is no folder; {remedy}") from None
    except (OSError, ValueError) as error:
        raise _unreadable(where, error, remedy) from None


@contextmanager
def written(target: Path, key: str, *, replace: bool = False) -> Iterator[Path]:
    """Gives a draft to write; it becomes the file that a user named once it is complete.

    Args:
        target: the file.
        key: the option or key that names it, e.g. "--out".
        replace: whether a file that is there makes room; else it is refused.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    if target.is_dir() or (not replace and os.path.lexists(target)):
        what = "is a folder" if target.is_dir() else "is there"
        raise ConfigError(f"{key} {target}: {what}; name another file")
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"{key} {target}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def absolute_place(name: str) -> str:
    """The same place in a file wherever a process is started; other names as they are."""
    place = place_of(name)
    return name if place is None else f"{place[0].absolute()}:{place[1]}"


def place_of(name: str) -> tuple[Path, str] | None:
    """The file and the name in it, of "file.py:name"; None of other names."""
    file, colon, attribute = name.rpartition(":")
    return (Path(file), attribute) if colon and file.endswith(".py") else None


def absolute_data(named: Path) -> Path:
    """The same data wherever a process is started."""
    return named if str(named).startswith(HUB) else named.absolute()


def imported(place: str) -> Any:  # noqa: ANN401
    """Runs the program and returns what stands at a place in it.

    The copy of a program finds the modules that were copied with it, and all else where the program
    was: its `__file__` is that.

    Raises:
        TimeoutError: the import has not ended within `IMPORT_S`.
        Exception: whatever the import raises, but for SystemExit, which would end who imports.
    """
    module, _, attribute = place.rpartition(":")
    try:
        with _watched(module):
            if module.endswith(".py"):
                return getattr(_run(Path(module)), attribute)
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.append(here)  # behind Python's own: a `code.py` there must not be taken
            return getattr(importlib.import_module(module), attribute)
    except SystemExit as error:
        raise ImportError(f"it called sys.exit({error.code!r})") from error


@contextmanager
def _watched(module: str) -> Iterator[None]:
    """Says now and then where an import is, and ends it in the end; in the main thread only, which
    signals interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begun = time.monotonic()

    def look(_: int, frame: FrameType | None) -> None:
        passed = time.monotonic() - begun
        if passed >= IMPORT_S:
            raise TimeoutError(f"the import takes longer than {IMPORT_S:g} s")
        place = _line_of(traceback.walk_stack(frame), newest=0)
        log.warning("%s: is imported since %.0f s, now at %s", module, passed, place or "?")

    before = signal.signal(signal.SIGALRM, look)
    others = signal.setitimer(signal.ITIMER_REAL, _TELL_S, _TELL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def raised(error: BaseException) -> str:
    """Says what a program of the user's raised as it was imported or made, and in which line."""
    line = _line_of(traceback.walk_tb(error.__traceback__), newest=-1)
    return type_and_line(error) + (f" ({line})" if line else "")


def _line_of(frames: Iterable[tuple[FrameType, int]], newest: int) -> str:
    """The line in the user's own files that is run, as "file.py:3"; "" if none is.

    Args:
        frames: of the stack, with their lines.
        newest: index of the innermost.
    """
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [place for place in places if not _is_of_others(place[0])]
    return f"{own[newest][0].name}:{own[newest][1]}" if own else ""


def _is_of_others(file: Path) -> bool:
    """Whether a file is Python's, a package's that is installed, or ours."""
    places = (_PACKAGE, *map(Path, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    return not file.is_absolute() or any(file.is_relative_to(place) for place in places)


def _run(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    origin = path.with_name(ORIGIN)
    if origin.exists():
        module.__file__ = origin.read_text()
        sys.path.insert(0, str(path.parent))  # before the folder of the command, maybe theirs
    sys.path.append(str(Path(str(module.__file__)).parent))  # files beside it can be imported
    spec.loader.exec_module(module)
    return module


def _unreadable(where: str, error: OSError | ValueError, remedy: str) -> ConfigError:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number in (errno.ENOENT, errno.ENOTDIR):
        return ConfigError(f"{where}: no such file; {remedy}")
    if number == errno.ENXIO:
        return ConfigError(f"{where}: is a socket or a device; {remedy}")
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"{where}: may not be read by you; ask its owner, or {remedy}")
    return ConfigError(f"{where}: cannot be read: {os.strerror(number or 0)}; {remedy}")
