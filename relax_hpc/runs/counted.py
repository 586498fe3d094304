"""The trajectories of a run, counted as it grows: what was counted before is not read again.

Whoever looks at a run keeps the counts for themselves, in a folder of their own.
"""

import hashlib
import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_hpc import permissions
from relax_hpc.bus.audit import BusAudit, Tally
from relax_hpc.errors import LaunchError
from relax_hpc.paths import BusPaths
from relax_hpc.storage import names

KEPT_RECORDS = 500
"""Records of the plan that are worth keeping the counts of."""
_FORMAT = 1
_MOST_KEPT = 200


def folder() -> Path:
    """Where counts are kept: `relax-hpc/counts` below the XDG folder for caches."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(said) if Path(said).is_absolute() else Path.home() / ".cache"
    return base / "relax-hpc" / "counts"


def count(bus: BusPaths) -> BusAudit:
    """Counts all that there is by now.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    try:
        kept = folder() / f"{_name_of(bus)}.json"
    except (OSError, RuntimeError):  # RuntimeError: no home
        return Tally.of(bus).counts()
    before = _read(kept)
    tally = Tally.of(bus, before)
    if tally.num_new_records >= KEPT_RECORDS:
        with suppress(OSError):
            _keep(kept, tally)
    return tally.counts()


def _name_of(bus: BusPaths) -> str:
    """A name that no other run has, though it took the place of this one."""
    found = bus.header.stat()
    said = [str(bus.root.resolve()), found.st_ino, found.st_mtime_ns, _FORMAT]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _read(path: Path) -> Any:  # noqa: ANN401 - `Tally.of` judges it
    """Reads counts that this user kept; None if there are none, or others may have written them."""
    try:
        permissions.check_own(path.parent, path)
        with path.open() as file:
            return json.load(file)
    except (OSError, ValueError, LaunchError):
        return None


def _keep(path: Path, tally: Tally) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(tally.to_record(), file, allow_nan=False, separators=(",", ":"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    every = [path.parent / name for name in names(path.parent)]
    for old in sorted(every, key=lambda each: each.stat().st_mtime)[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)
