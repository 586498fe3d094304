"""Opens files that a user named. Any problem is a one-line error; nothing blocks."""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.storage import patiently

_KINDS = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
    stat.S_IFLNK: "is a link",
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
"""Prefix of a Hugging Face data set's name, where a path could stand."""
_BOM = b"\xef\xbb\xbf"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_file(path: Path, remedy: str) -> BinaryIO:
    """Opens a regular file.

    Args:
        remedy: advice if it cannot be used, e.g. "name a TOML file".

    Raises:
        ConfigError: missing, unreadable, a folder, a pipe, a socket or a device.
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


def open_text(path: Path, remedy: str) -> BinaryIO:
    """Opens a text file, behind its byte order mark if it has one.

    Raises:
        ConfigError: as `open_file`, or its first bytes are not text.
    """

    def begin() -> tuple[BinaryIO, bytes]:
        file = open_file(path, remedy)
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
    """Reads a file of UTF-8 text.

    Raises:
        ConfigError: as `open_text`, or not UTF-8.
    """

    def read() -> bytes:
        with open_text(path, remedy) as file:
            return file.read()

    try:
        return patiently(path, read).decode()
    except OSError as error:
        raise _unreadable(str(path), error, remedy) from None
    except UnicodeDecodeError as error:
        said = f"is not UTF-8 text ({error.reason})"
        raise ConfigError(f"{path}: {said}; {remedy}") from None


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        ConfigError: as `read_text`, or not a JSON object.
    """
    return parse_object(str(path), read_text(path, remedy), remedy)


def parse_object(where: str, text: str, remedy: str) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        where: its name in messages.
        remedy: advice if it is something else.

    Raises:
        ConfigError: not a JSON object, or it has half of a surrogate pair.
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
        where: its name in messages.
        remedy: advice if it cannot.

    Raises:
        ConfigError: it cannot, or is missing.
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
def write_named(
    target: Path, key: str, *, replace: bool = False, in_run: bool = False
) -> Iterator[BinaryIO]:
    """Yields an open draft that becomes the file a user named once it is complete.

    Others may write in the folder: the draft has an unpredictable name, is never written through a
    link, and stays in the folder that was found, wherever the path leads by then.

    Args:
        key: the option or key that names it, e.g. "--out".
        replace: whether to replace an existing file; else that is an error.
        in_run: the folder must be a run that is this user's alone.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    draft = f".{secrets.token_hex(8)}.tmp"
    try:
        folder = permissions.open_folder(target.parent)
        try:
            _check_free(f"{key} {target}", target, folder, replace=replace)
            if in_run:
                _check_own_run(f"{key} {target}", folder)
            with os.fdopen(os.open(draft, _NEW, 0o666, dir_fd=folder), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{key} {target}: cannot be written: {error.strerror}") from error


def _check_free(where: str, target: Path, folder: int, *, replace: bool) -> None:
    try:
        kind = stat.S_IFMT(os.lstat(target.name or ".", dir_fd=folder).st_mode)
    except FileNotFoundError:
        return
    if target.is_dir():
        what = "is a folder"
    elif not replace:
        what = "is there"
    elif kind == stat.S_IFREG:
        return
    else:
        what = _KINDS.get(kind, "is no file")
    raise ConfigError(f"{where}: {what}; name another file")


def _check_own_run(where: str, folder: int) -> None:
    for name in (".", "run.json"):
        if not permissions.is_own(os.lstat(name, dir_fd=folder)):
            raise ConfigError(f"{where}: is in a run that is not yours alone; name another file")


def absolute_data(named: Path) -> Path:
    """Makes a data path independent of the working directory."""
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
