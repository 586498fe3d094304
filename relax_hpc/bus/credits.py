"""Reads and writes the trainer's grants: how far rollout may run ahead, what owners may delete.

The same file fences: a starting trainer writes its own grant before it reads the plan. A superseded
trainer finds that grant after its own last one. Checking costs one read and no name look-up.
"""

import threading
import time
from typing import NamedTuple

from relax_hpc.bus.durable import GrowingFile
from relax_hpc.bus.frames import FrameWriter, Record, decode
from relax_hpc.errors import FencedError
from relax_hpc.runtime.paths import BusPaths


class Owed(NamedTuple):
    """A prompt group that was committed, will not be trained on, and must be sampled again."""

    guid: int
    """A prompt group; -1 is every group of the shard, which cannot be read."""
    uuid: str
    """The shard that no longer counts; a later commit does."""


class Credit(NamedTuple):
    """A grant; the newest counts. After a restart of the trainer the values may go back."""

    step: int = 0
    policy_version: int = 0
    retired_guid_below: int = 0
    """Shards whose guids are all below may be deleted: no resume needs them."""
    finished: bool = False
    """Nothing more will be trained on."""
    owed: tuple[Owed, ...] = ()
    """Groups to sample again, not planned yet."""
    batch_ends: tuple[int, ...] = ()
    """The guid after the end of each batch, from that of `step` + 1 on; empty: multiples of P.
    Skipped groups move them up, never down."""
    judged_guid_below: int = 0
    """All guids below are planned, skipped (and in the plan), or wait for their step. Updated at
    multiples of `staleness.judging_span`."""
    seen: tuple[int, ...] = ()
    """For each producer of the header, the sequence number after its newest shard whose skips are
    in `batch_ends`; empty if unknown."""

    def covers(self, guid: int, place: tuple[int, int] | None) -> bool:
        """Whether `batch_ends` already account for a group in case it is skipped.

        Args:
            place: number of its producer in the header (unseen if not in `seen`) and sequence
                number of its shard; None: not committed yet.
        """
        if guid < self.retired_guid_below:
            return True
        if place is None:
            return False
        producer, seq = place
        return producer < len(self.seen) and seq < self.seen[producer]


class CreditWriter:
    """Appends to the log of credits, for the sequencer. Opening it fences every earlier writer."""

    def __init__(self, paths: BusPaths, plan_fence: int) -> None:
        self._plan_fence = plan_fence
        self._lock = threading.RLock()  # a checkpoint asks whether it is fenced from its own thread
        self._frames = FrameWriter(paths.credits)
        self._tail = GrowingFile(paths.credits)
        newest = _Newest()
        newest.add(self._frames.found)
        self._fenced_by = max((r["plan_fence"] for r in self._frames.found), default=0)
        self._frames.found.clear()  # three for each step of a run
        self.inherited = (newest.credit or Credit())._replace(finished=False)
        """The last grant of the previous trainer."""
        self.write(self.inherited)

    def write(self, credit: Credit) -> None:
        """Raises:
        FencedError: a newer trainer has started.
        BusError: storage refused.
        """
        with self._lock:
            self.check_fenced()
            self._frames.append({"plan_fence": self._plan_fence, **credit._asdict()})

    def check_fenced(self) -> None:
        """Raises:
        FencedError: a newer trainer has started; this one must publish nothing more and end.
        """
        with self._lock:
            end = self._frames.end
            records, size = decode(self._tail.read_from(end), self._frames.path, end)
            self._frames.skip(size)
            self._fenced_by = max([self._fenced_by, *(record["plan_fence"] for record in records)])
        if self._fenced_by > self._plan_fence:
            raise FencedError(
                f"{self._frames.path}: plan fence {self._fenced_by} was claimed after "
                f"{self._plan_fence}; another trainer took over, this one must end"
            )

    def close(self) -> None:
        self._frames.close()
        self._tail.close()


class CreditTail:
    """Follows the log of credits.

    Args:
        num_steps: of the run. An end after fewer steps is that of a run that was extended since.
        every_s: seconds between polls; all producers of a run read this one file.
    """

    def __init__(self, paths: BusPaths, *, num_steps: int = 0, every_s: float = 0.0) -> None:
        self._every_s, self._next_look = every_s, 0.0
        self._file = GrowingFile(paths.credits)
        self._end = 0
        self._newest = _Newest(num_steps)

    def latest(self) -> Credit | None:
        """Returns the newest credit as of the last poll; None before the first trainer has
        started."""
        if time.monotonic() < self._next_look:
            return self._newest.credit
        self._next_look = time.monotonic() + self._every_s
        records, size = decode(self._file.read_from(self._end), self._file.path, self._end)
        self._end += size
        self._newest.add(records)
        return self._newest.credit

    @property
    def plan_fence(self) -> int:
        """Returns the newest trainer's fence as of the last poll; 0 before the first has
        started."""
        return self._newest.plan_fence

    def close(self) -> None:
        self._file.close()


class _Newest:
    """The last credit of the highest plan fence; a fenced trainer grants nothing."""

    def __init__(self, num_steps: int = 0) -> None:
        self.credit: Credit | None = None
        self.plan_fence, self._num_steps = 0, num_steps

    def add(self, records: list[Record]) -> None:
        for record in records:
            if record["plan_fence"] >= self.plan_fence:
                self.plan_fence = record["plan_fence"]
                values = {key: value for key, value in record.items() if key != "plan_fence"}
                owed = tuple(Owed(*entry) for entry in values.pop("owed", ()))
                ends, seen = (tuple(values.pop(name, ())) for name in ("batch_ends", "seen"))
                credit = Credit(**values, owed=owed, batch_ends=ends, seen=seen)
                is_end = credit.finished and credit.step >= self._num_steps
                self.credit = credit._replace(finished=is_end)
