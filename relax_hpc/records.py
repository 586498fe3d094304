"""Small JSON records, published whole and never half seen; files that outlive a power cut."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_json(path: Path, record: object) -> None:
    """Publishes `record` at `path`, replacing what was there.

    Readers may open the final name at any moment, so it must never name a half-written file: write
    beside it, flush to disk, then rename, which is atomic within one POSIX file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json_once(path: Path, record: object) -> bool:
    """Publishes `record` at `path` unless something is there; whether it did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    with draft.open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # of several writers, on several nodes, one succeeds
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def read_json(path: Path) -> Any | None:  # noqa: ANN401
    """The record at `path`; None while there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def sync(path: Path) -> None:
    """Makes the content of a file, or the names that are in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
