"""Small JSON records, published whole and never half seen; files that outlive a power cut; CRCs.

JSON has no numbers that are not finite: what is written here may hold none, or says null for them.
"""

import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import crc32c

from relax_hpc import storage

Buffer = bytes | bytearray | memoryview


def checksum(data: Buffer, before: int = 0) -> int:
    """CRC32C (Castagnoli), as the CPU computes it: about 10 GB/s on one core.

    Args:
        before: checksum of the bytes in front of `data`, to go on from.
    """
    # The lock of the interpreter is always released: whoever writes beside this must not wait.
    return cast(int, crc32c.crc32c(data, before, 1))


def write_json(path: Path, record: object) -> None:
    """Publishes `record` at `path`, replacing what was there."""
    write_text(path, json.dumps(record, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Publishes `text` at `path`, replacing what was there.

    Readers may open the final name at any moment, so it must never name a half-written file: write
    beside it, flush to disk, then rename, which is atomic within one POSIX file system. All of it
    is done again where storage fails for a while: the same text gets the same name.
    """
    draft = _draft_of(path)

    def publish() -> None:
        _write_draft(draft, text)
        draft.replace(path)

    try:
        storage.patiently(path, publish, small=True)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def write_json_once(path: Path, record: object) -> bool:
    """Publishes `record` at `path` unless something is there; whether it did."""
    draft = _draft_of(path)
    text = json.dumps(record, indent=1, allow_nan=False)

    def publish() -> bool:
        try:
            os.link(draft, path)  # of several writers, on several nodes, one succeeds
        except FileExistsError:  # perhaps by an attempt that was said to have failed
            return draft.samefile(path)
        return True

    try:
        storage.patiently(path, lambda: _write_draft(draft, text), small=True)
        return storage.patiently(path, publish, small=True)
    finally:
        storage.delete(draft)


def _draft_of(path: Path) -> Path:
    """A name that nobody else uses: on another node, a process may have the same id."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")


def _write_draft(draft: Path, text: str) -> None:
    draft.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(text.encode())
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


class _NotFinite(str):
    """A number that JSON does not know, as Python's json writes it."""

    __slots__ = ()


def finite(
    record: dict[str, Any], default: Callable[[object], object] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """`record` as JSON can say it, with null for every number that is not finite.

    Args:
        default: as `json.dumps` takes it.

    Returns:
        It, and the keys where such a number was: NaN, Infinity or -Infinity.
    """
    said: dict[str, Any] = json.loads(
        json.dumps(record, default=default), parse_constant=_NotFinite
    )
    odd = {key: value for key, inside in said.items() for value in _odd(inside)}
    return {key: _with_null(value) for key, value in said.items()}, odd


def _odd(value: object) -> list[str]:
    if isinstance(value, _NotFinite):
        return [str(value)]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for each in inside for found in _odd(each)]


def _with_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_null(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_with_null(inside) for inside in value]
    return None if isinstance(value, _NotFinite) else value


def read_json(path: Path) -> Any | None:  # noqa: ANN401
    """The record at `path`; None while there is none."""
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError:
        return None


def read_bytes(path: Path) -> bytes:
    """Returns what a file holds."""

    def read() -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            return file.read() or b""

    return storage.patiently(path, read)


def sync(path: Path) -> None:
    """Makes the content of a file, or the names that are in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
