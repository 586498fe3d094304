"""The plan: which rows each step trains on, decided once, in a log per incarnation of the trainer.

Each incarnation claims the next fence. Its log begins with the fence it continues and how many
records it keeps; what a fenced predecessor appends afterwards is thereby cut off.
"""

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from relax_hpc.bus.frames import Record, read_frames
from relax_hpc.bus.snapshot import NOTHING, Snapshot, read_snapshots
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.records import sync
from relax_hpc.schema import Role
from relax_hpc.storage import exists, names, patiently

_LOG = re.compile(r"f\d+\.log")


class Part(NamedTuple):
    """The rows of one prompt group, in one shard: lo <= row < hi."""

    producer: str
    fence: int
    seq: int
    uuid: str
    lo: int
    hi: int


class Sidecar(NamedTuple):
    """A shard with further columns of another one."""

    writer: str
    fence: int
    seq: int
    uuid: str


class PlanRecord(NamedTuple):
    """One batch, or a portion of one; `_asdict()` is JSON. The audit needs no shard besides."""

    step: int
    guids: list[int]
    parts: list[Part]
    """The rows of `guids`, one part per prompt group, by (guid, sibling, segment)."""
    num_trajectories: int
    policy_version_min: int
    """Oldest policy that sampled a token of it; -1 if none did."""
    num_tokens: int
    portion: int = 0
    """0-based within the step."""
    last: bool = True
    """Whether it completes the batch of its step."""
    sidecars: Mapping[str, dict[Role, Sidecar]] = MappingProxyType({})
    """uuid of a shard of `parts` -> role -> the sidecar that counts."""

    @classmethod
    def from_json(cls, record: Record) -> Self:
        sidecars = {
            uuid: {role: Sidecar(*sidecar) for role, sidecar in roles.items()}
            for uuid, roles in record["sidecars"].items()
        }
        parts = [Part(*part) for part in record["parts"]]
        return cls(**{**record, "parts": parts, "sidecars": sidecars})


class IgnoredShard(NamedTuple):
    """Rows that were committed again: a producer had lost its acknowledgement."""

    uuid: str
    rows: int


class DroppedGroup(NamedTuple):
    """Rows that will not be trained on; their owner samples the prompt again."""

    guid: int
    """-1: every group of the shard, which cannot be read."""
    dropped: str
    """uuid of the shard."""
    rows: int
    why: str
    """`over_age` or `damaged`."""
    step: int
    """The step that was being planned."""


class SkippedGroup(NamedTuple):
    """Rows that will not be trained on, since they teach nothing: further groups take their place.

    Their owner may delete them, as if they had been trained on.
    """

    guid: int
    skipped: str
    """uuid of the shard."""
    rows: int
    step: int
    """The step that was being planned."""
    prompt: int
    """Row of the data."""
    solved: bool
    """Whether the policy can do it already; else it never could."""
    reward: float | None
    """Mean over the episodes that have one; None if none has."""
    truncated: bool = False
    """Whether nothing is left of it because its responses were cut off."""
    retired: bool = False
    """Whether nobody was asked, since its prompt has been solved often enough."""


AnyRecord = PlanRecord | IgnoredShard | DroppedGroup | SkippedGroup


class PlanPosition(NamedTuple):
    """The place in the plan that a checkpoint has come to."""

    fence: int
    records: int
    """Records of the chain up to and including the last one of `step`."""
    step: int


class ChainRecord(NamedTuple):
    record: AnyRecord
    fence: int
    end: int
    """Byte at which it ends in the log of `fence`."""


class Chain(NamedTuple):
    """The one valid history: records of all fences, what was cut off left out."""

    fence: int
    """Newest fence with a header; 0 if nothing was ever planned."""
    base: Snapshot
    """Sums up the records in front of `records`."""
    records: list[ChainRecord]
    links: list[tuple[int, int]]
    """(fence, records it kept of the fences before), oldest first."""

    @property
    def steps(self) -> list[PlanRecord]:
        """The portions of all batches, in order."""
        return [r.record for r in self.records if isinstance(r.record, PlanRecord)]

    @property
    def ignored(self) -> list[IgnoredShard]:
        return [r.record for r in self.records if isinstance(r.record, IgnoredShard)]

    @property
    def dropped(self) -> list[DroppedGroup]:
        return [r.record for r in self.records if isinstance(r.record, DroppedGroup)]

    @property
    def skipped(self) -> list[SkippedGroup]:
        return [r.record for r in self.records if isinstance(r.record, SkippedGroup)]

    @property
    def num_records(self) -> int:
        return self.base.records + len(self.records)

    def check(self, position: PlanPosition) -> None:
        """Raises:
        BusError: `position` is not on this chain; its checkpoint came from a fenced trainer.
        """
        later = [keep for fence, keep in self.links if fence > position.fence]
        known = position.fence in [fence for fence, _ in self.links] or position.records == 0
        step = -1
        if position.records == self.base.records:
            step = self.base.step
        elif self.base.records < position.records <= min([self.num_records, *later]):
            record = self.records[position.records - 1 - self.base.records].record
            step = record.step if isinstance(record, PlanRecord) and record.last else -1
        if step != position.step or not known:
            raise BusError(
                f"the checkpoint's plan position {tuple(position)} is not in this run's plan "
                f"(fences {self.links}): a fenced trainer or another run wrote it, or no shard of "
                "that time is left; resume from another checkpoint"
            )


def newest_fence(paths: BusPaths) -> int:
    """The highest claim; its owner is the only one whose plan counts."""
    claims = [name for name in names(paths.plan) if name.startswith("FENCE.")]
    return max((int(claim.removeprefix("FENCE.")) for claim in claims), default=0)


def claim_fence(paths: BusPaths) -> int:
    """Takes the next fence; O_EXCL lets one of two racing trainers have each number.

    Raises:
        BusError: the folder of the plan cannot be written.
    """
    fence = newest_fence(paths)
    while True:
        fence += 1
        claim = paths.plan_claim(fence)
        try:
            # If storage says no to one that it made, the next attempt finds it there: a gap.
            patiently(claim, partial(_make_claim, claim), small=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BusError(f"{claim}: cannot be made: {error.strerror}") from error
        return fence


def _make_claim(claim: Path) -> None:
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    sync(claim.parent)


def read_chain(paths: BusPaths, *, below: int | None = None, whole: bool = True) -> Chain:
    """Reads the valid plan, of the newest fence or of the newest one below `below`.

    Args:
        whole: every record; else those behind the newest snapshot that is on the chain.

    Raises:
        BusError: a record of the plan is damaged.
    """
    newest = newest_fence(paths) if below is None else below - 1
    for snapshot in [] if whole else read_snapshots(paths):
        if snapshot.fence <= newest and (chain := _read(paths, newest, snapshot)):
            return chain
    chain = _read(paths, newest, NOTHING)
    assert chain is not None
    return chain


def read_chain_behind(paths: BusPaths, base: Snapshot) -> Chain | None:
    """Reads the valid plan from a place on; None if it does not go through there any more.

    Args:
        base: says the place by `fence`, `records` and `end`; a restart may have cut it off.

    Raises:
        BusError: a record of the plan is damaged.
    """
    return _read(paths, newest_fence(paths), base)


def is_planned(paths: BusPaths, position: PlanPosition) -> bool:
    """Whether a checkpoint's position is on the valid plan.

    Raises:
        BusError: a record of the plan is damaged.
    """
    chain = read_chain(paths, whole=False)
    try:
        chain.check(position)
    except BusError:
        return False
    return True


def gone_of_first_step(paths: BusPaths) -> Path | None:
    """A shard of the batch of step 1 that was deleted since; None: that step can be trained again,
    or has not been."""
    first = (record for record in read_chain(paths).steps if record.step == 1)
    shards = (paths.shard(p.producer, p.fence, p.seq) for record in first for p in record.parts)
    return next((shard for shard in shards if not exists(shard)), None)


def _read(paths: BusPaths, fence: int, base: Snapshot) -> Chain | None:
    """The chain that ends at `fence` and begins behind `base`; None if `base` is not on it."""
    listed = [paths.plan / name for name in names(paths.plan) if _LOG.fullmatch(name)]
    logs = {int(log.stem[1:]): log for log in listed}
    segments = []
    while fence > base.fence:
        frames = read_frames(logs[fence]) if fence in logs else []
        if not frames:  # claimed, but its owner died before it wrote the header
            fence -= 1
            continue
        (header, _), *records = frames
        segments.append((fence, int(header["keep"]), records))
        fence = header["parent"]
    if fence < base.fence or any(keep < base.records for _, keep, _ in segments):
        return None
    if base.fence:
        segments.append((base.fence, base.records, read_frames(logs[base.fence], base.end)))
    chain: list[ChainRecord] = []
    for owner, keep, records in reversed(segments):
        if keep > (there := base.records + len(chain)):
            raise BusError(
                f"{paths.plan_log(owner)}: continues a plan of {keep} records, of which {there} "
                "are there; restore the logs of the fences before it"
            )
        found = [ChainRecord(parse(record), owner, end) for record, end in records]
        chain = chain[: keep - base.records] + found
    links = [(owner, keep) for owner, keep, _ in reversed(segments)]
    return Chain(segments[0][0] if segments else 0, base, chain, links)


def parse(record: Record) -> AnyRecord:
    """Makes a record of the plan of what its log says."""
    if "parts" in record:
        return PlanRecord.from_json(record)
    if "skipped" in record:
        return SkippedGroup(**record)
    return DroppedGroup(**record) if "dropped" in record else IgnoredShard(**record)
