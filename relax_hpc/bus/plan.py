"""The plan: which rows each step trains on, decided once, in a log per incarnation of the trainer.

Each incarnation claims the next epoch. Its log begins with the epoch it continues and how many
records it keeps; what a fenced predecessor appends afterwards is thereby cut off.
"""

import os
from typing import NamedTuple, Self

from relax_hpc.bus.durable import sync_folder
from relax_hpc.bus.frames import Record, read_frames
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths


class Part(NamedTuple):
    """The rows of one prompt group, in one shard: lo <= row < hi."""

    producer: str
    epoch: int
    seq: int
    uuid: str
    lo: int
    hi: int


class PlanRecord(NamedTuple):
    """One batch; `_asdict()` is JSON. It says enough for the audit to do without the shards."""

    step: int
    guids: list[int]
    parts: list[Part]
    """The rows of `guids`, one part per prompt group, in guid then sibling order."""
    num_trajectories: int
    policy_version_min: int
    """Oldest policy that sampled a token of the batch; -1 if none did."""

    @classmethod
    def from_json(cls, record: Record) -> Self:
        return cls(**{**record, "parts": [Part(*part) for part in record["parts"]]})


class IgnoredShard(NamedTuple):
    """Rows that were committed again: a producer had lost its acknowledgement."""

    uuid: str
    rows: int


class PlanPosition(NamedTuple):
    """How far a checkpoint has come in the plan."""

    epoch: int
    records: int
    """Records of the chain up to and including the one of `step`."""
    step: int


class Chain(NamedTuple):
    """The one valid history: records of all epochs, what was cut off left out."""

    epoch: int
    """Newest epoch with a header; 0 if nothing was ever planned."""
    records: list[PlanRecord | IgnoredShard]
    links: list[tuple[int, int]]
    """(epoch, records it kept of the epochs before), oldest first."""

    @property
    def steps(self) -> list[PlanRecord]:
        return [record for record in self.records if isinstance(record, PlanRecord)]

    @property
    def ignored(self) -> list[IgnoredShard]:
        return [record for record in self.records if isinstance(record, IgnoredShard)]

    def check(self, position: PlanPosition) -> None:
        """Raises:
        BusError: `position` is not on this chain; its checkpoint came from a fenced trainer.
        """
        later = [keep for epoch, keep in self.links if epoch > position.epoch]
        known = position.epoch in [epoch for epoch, _ in self.links]
        step = 0
        if known and 0 < position.records <= min([len(self.records), *later]):
            record = self.records[position.records - 1]
            step = record.step if isinstance(record, PlanRecord) else -1
        if step != position.step or not known:
            raise BusError(
                f"the checkpoint's plan position {tuple(position)} is not in this run's plan "
                f"(epochs {self.links}): a fenced trainer or another run wrote it; "
                "resume from an earlier checkpoint"
            )


def newest_epoch(paths: BusPaths) -> int:
    """The highest claim; its owner is the only one whose plan counts."""
    return max((int(claim.suffix[1:]) for claim in paths.plan.glob("EPOCH.*")), default=0)


def claim_epoch(paths: BusPaths) -> int:
    """Takes the next epoch; O_EXCL lets one of two racing trainers have each number."""
    epoch = newest_epoch(paths)
    while True:
        epoch += 1
        try:
            os.close(os.open(paths.plan_claim(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        sync_folder(paths.plan)
        return epoch


def read_chain(paths: BusPaths, *, below: int | None = None) -> Chain:
    """Reads the valid plan, of the newest epoch or of the newest one below `below`.

    Raises:
        BusError: a record of the plan is damaged.
    """
    logs = {int(log.stem[1:]): log for log in paths.plan.glob("e*.log")}
    epoch = newest_epoch(paths) if below is None else below - 1
    segments = []
    while epoch > 0:
        frames = read_frames(logs[epoch]) if epoch in logs else []
        if not frames:  # claimed, but its owner died before it wrote the header
            epoch -= 1
            continue
        segments.append((epoch, frames))
        epoch = frames[0]["parent"]
    records: list[Record] = []
    links = []
    for owner, (header, *frames) in reversed(segments):
        records = records[: header["keep"]] + frames
        links.append((owner, int(header["keep"])))
    newest = segments[0][0] if segments else 0
    return Chain(newest, [_parse(record) for record in records], links)


def _parse(record: Record) -> PlanRecord | IgnoredShard:
    return PlanRecord.from_json(record) if "step" in record else IgnoredShard(**record)
