"""Making and opening a bus. Every growing file exists before any role starts.

A name looked up too early may stay "missing" in a client's cache for seconds, so nobody ever has
to look one up: the launcher makes them all.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.bus.durable import sync_folder
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.records import read_json, write_json

FORMAT = 1


class BusHeader(NamedTuple):
    """RUN.json: written once at launch, never changed."""

    format: int
    producers: list[str]
    run: dict[str, Any]
    """What the launcher wanted to be remembered with the data."""


def create(paths: BusPaths, producers: Sequence[str], header: Mapping[str, object]) -> None:
    """Makes the folders, empty logs and credits, and RUN.json last.

    Raises:
        BusError: there is a bus already; a run directory is used once.
    """
    for folder in (paths.plan, paths.credits.parent, *map(paths.producer, producers)):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for file in (paths.credits, *map(paths.log, producers)):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            sync_folder(file.parent)
    except FileExistsError as error:
        raise BusError(
            f"{paths.root}: holds a bus already; a run directory is used once, choose another name"
        ) from error
    write_json(paths.header, {"format": FORMAT, "producers": list(producers), "run": dict(header)})
    sync_folder(paths.root)


def open_bus(paths: BusPaths) -> BusHeader:
    """Reads RUN.json.

    Raises:
        BusError: not a bus, or one of a newer format.
    """
    record = read_json(paths.header)
    if record is None:
        raise BusError(f"{paths.root}: is not a bus (no {paths.header.name})")
    if record["format"] > FORMAT:
        raise BusError(
            f"{paths.header}: is bus format {record['format']}, this relax-hpc reads up to "
            f"{FORMAT}; use the version that wrote it, or a newer one"
        )
    return BusHeader(**record)
