"""What the trainer grants: how far rollout may run ahead, and what owners may delete."""

from typing import NamedTuple

from relax_hpc.bus.frames import FrameWriter, decode
from relax_hpc.bus.tail import GrowingFile
from relax_hpc.paths import BusPaths


class Credit(NamedTuple):
    """The newest one counts. After a restart of the trainer the values may go back."""

    step: int = 0
    """Last step trained."""
    policy_version: int = 0
    retired_guid_below: int = 0
    """No resume can need a shard whose guids are all below: its owner may delete it."""
    finished: bool = False
    """Nothing more will be trained on."""


class CreditWriter:
    """Appends to the log of credits; the sequencer's."""

    def __init__(self, paths: BusPaths, plan_epoch: int) -> None:
        self._plan_epoch = plan_epoch
        self._frames = FrameWriter(paths.credits)

    def write(self, credit: Credit) -> None:
        self._frames.append({"plan_epoch": self._plan_epoch, **credit._asdict()})

    def close(self) -> None:
        self._frames.close()


class CreditTail:
    """Follows the log of credits."""

    def __init__(self, paths: BusPaths) -> None:
        self._file = GrowingFile(paths.credits)
        self._end = 0
        self._plan_epoch = 0
        self._latest: Credit | None = None

    def latest(self) -> Credit | None:
        """The newest credit; None before the first trainer has started."""
        records, size = decode(self._file.read_from(self._end), self._file.path)
        self._end += size
        for record in records:
            plan_epoch = record.pop("plan_epoch")
            if plan_epoch >= self._plan_epoch:  # a fenced trainer grants nothing
                self._plan_epoch = plan_epoch
                self._latest = Credit(**record)
        return self._latest

    def close(self) -> None:
        self._file.close()
