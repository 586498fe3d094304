"""Making and opening a bus. Every growing file exists before any role starts.

A name looked up too early may stay "missing" in a client's cache for seconds, so nobody ever has
to look one up: the launcher makes them all.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.records import read_json, sync, write_json
from relax_hpc.schema import COLUMNS, Role

FORMAT = 5


class BusHeader(NamedTuple):
    """RUN.json: written once at launch, never changed."""

    format: int
    producers: list[str]
    run: dict[str, Any]
    """Facts that the launcher wanted to be remembered with the data."""
    sidecar_writers: Mapping[str, Role] = MappingProxyType({})
    """Name -> role of those that add columns to shards of `producers`."""


def create(
    paths: BusPaths,
    producers: Sequence[str],
    header: Mapping[str, object],
    *,
    sidecar_writers: Mapping[str, Role] | None = None,
) -> None:
    """Makes the folders, empty logs and credits, and RUN.json last.

    Raises:
        BusError: there is a bus already (a run directory is used once), or it cannot be written.
    """
    writers = dict(sidecar_writers or {})
    names = [*producers, *writers]
    try:
        for folder in (paths.plan, paths.credits.parent, *map(paths.producer, names)):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.credits, *map(paths.log, names)):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            sync(file.parent)
        write_json(
            paths.header, BusHeader(FORMAT, list(producers), dict(header), writers)._asdict()
        )
        sync(paths.root)
    except FileExistsError as error:
        raise BusError(
            f"{paths.root}: holds a bus already; a run directory is used once, choose another name"
        ) from error
    except OSError as error:
        raise BusError(f"{paths.root}: a bus cannot be made here: {error.strerror}") from error


def open_bus(paths: BusPaths) -> BusHeader:
    """Reads RUN.json.

    Raises:
        BusError: not a bus, or one of another format.
    """
    try:
        record = read_json(paths.header)
        if record is None:
            raise BusError(f"{paths.root}: is not a bus (no {paths.header.name})")
        if int(record["format"]) == FORMAT:
            return BusHeader(**record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BusError(f"{paths.header}: cannot be read: {error}; restore the file") from error
    raise BusError(
        f"{paths.header}: is bus format {record['format']}, this relax-hpc reads {FORMAT}; use the "
        "version that wrote it"
    )


def roles_of(header: BusHeader, columns: Collection[str]) -> tuple[Role, ...]:
    """Roles of sidecar writers that write one of `columns`: those that a batch waits for."""
    roles = dict.fromkeys(header.sidecar_writers.values())
    return tuple(role for role in roles if any(COLUMNS[name].writer == role for name in columns))


def check_needs(paths: BusPaths, header: BusHeader, needs: Sequence[Role]) -> None:
    """Raises:
    BusError: groups are to wait for columns that nobody writes.
    """
    written = set(header.sidecar_writers.values())
    for role in needs:
        if role not in written:
            raise BusError(
                f"{paths.header}: batches need the columns of {role}, but no sidecar writer has "
                f"that role; there are {sorted(written) or 'none'}"
            )
