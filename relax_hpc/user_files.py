"""Files that a user named. What cannot be read or written is refused in one line; nothing waits."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.errors import ConfigError
from relax_hpc.storage import patiently

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
HUB = "hf:"
"""Begin of the name of a data set of the Hugging Face hub, where a path could stand."""
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

    def begin() -> tuple[BinaryIO, bytes]:
        file = opened(path, remedy)
        try:
            return file, file.read(8)
        except OSError:
            file.close()
            raise

    try:
        file, head = patiently(path, begin)
    except OSError as error:
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

    def read() -> bytes:
        with opened_text(path, remedy) as file:
            return file.read()

    try:
        return patiently(path, read).decode()
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


def absolute_data(named: Path) -> Path:
    """The same data wherever a process is started."""
    return named if str(named).startswith(HUB) else named.absolute()


def _unreadable(where: str, error: OSError | ValueError, remedy: str) -> ConfigError:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number in (errno.ENOENT, errno.ENOTDIR):
        return ConfigError(f"{where}: no such file; {remedy}")
    if number == errno.ENXIO:
        return ConfigError(f"{where}: is a socket or a device; {remedy}")
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"{where}: may not be read by you; ask its owner, or {remedy}")
    return ConfigError(f"{where}: cannot be read: {os.strerror(number or 0)}; {remedy}")
