"""The newest snapshot of a run, for engines that load it by themselves, whenever they are there."""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Self

from relax_hpc.fleet import seen
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json


class Newest(NamedTuple):
    """A complete snapshot. The record of it has one writer, rank 0 of the trainer."""

    version: int
    """Version of the policy. It never falls: a trainer that was restarted is behind for a while."""
    folder: Path
    """Never used twice, so a version that was made again is another snapshot."""
    checksums: list[int]
    """CRC-32 of its files, in the order of their names, if engines are to be compared with them."""
    by_name: str
    """Digest of its tensors by name, in the same case; else empty."""

    @property
    def is_checked(self) -> bool:
        return bool(self.checksums)

    def write(self, paths: RunPaths) -> None:
        write_json(paths.snapshot, self._asdict() | {"folder": self.folder.name})
        seen.folder_at(paths.control).note()

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """None before the first was written."""
        record = read_json(paths.snapshot)
        if record is None:
            return None
        return cls(**record | {"folder": paths.weights / record["folder"]})


@lru_cache(8)
def follow(paths: RunPaths) -> Callable[[], Newest | None]:
    """Does as `Newest.read`, for all of a process who look again and again."""
    return seen.follow(paths.snapshot, partial(Newest.read, paths))
