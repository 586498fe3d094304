"""Shards that stay open between looks: each costs one open and one close, however often read."""

from collections.abc import Iterable

from relax_hpc.bus.shards.shard import Shard
from relax_hpc.errors import DamagedError
from relax_hpc.paths import BusPaths

MAX_OPEN = 256
"""Well below the 1,024 descriptors a process usually may have."""


class OpenShards:
    """The open shards of one process, the least recently used closed first.

    Args:
        paths: of the bus.
        verify: whether every byte is checked when it is read.
    """

    def __init__(self, paths: BusPaths, *, verify: bool = True) -> None:
        self._paths, self._verify = paths, verify
        self._open: dict[str, Shard] = {}

    def get(self, owner: str, fence: int, seq: int, uuid: str) -> Shard:
        """The shard, for reading until something else is asked for.

        Raises:
            DamagedError: it is missing, damaged or another one.
        """
        shard = self._open.pop(uuid, None) or self._look_up(owner, fence, seq, uuid)
        self._open[uuid] = shard
        if len(self._open) > MAX_OPEN:
            self.close([next(iter(self._open))])
        return shard

    def close(self, uuids: Iterable[str] | None = None) -> None:
        """Closes some, or all."""
        for uuid in list(self._open if uuids is None else uuids):
            if shard := self._open.pop(uuid, None):
                shard.close()

    def _look_up(self, owner: str, fence: int, seq: int, uuid: str) -> Shard:
        path = self._paths.shard(owner, fence, seq)
        shard = Shard(path, verify=self._verify)
        if shard.uuid != uuid:
            shard.close()
            raise DamagedError(
                f"{path}: is not the shard that record {uuid} committed; restore the file"
            )
        return shard
