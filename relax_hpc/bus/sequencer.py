"""Turns committed prompt groups into batches, in one total order, each once.

Lives in rank 0 of the trainer. The over-age policy decides about groups that come late:

* wait: batch b is the guids (b-1) P <= guid < b P. No token is older than the rollout's pacing
  allows; the slowest group of a batch holds up its step.
* drop: batch b is the first P ready groups, lowest guid first. A group that would be trained on too
  late is dropped, and its owner samples the prompt again.
* mask: as drop, but its over-age tokens leave the loss instead.

A group that teaches nothing is skipped on arrival, so b P counts the others. Every decision is a
record of the plan, so a replay is exact under each policy.
"""

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Self

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit, CreditWriter, Owed
from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.intake import Intake
from relax_hpc.bus.layout import BusHeader
from relax_hpc.bus.plan import (
    AnyRecord,
    Chain,
    DroppedGroup,
    GuidSet,
    IgnoredShard,
    PlanPosition,
    PlanRecord,
    PlanSnapshot,
    SkippedGroup,
    claim_fence,
    read_chain,
    remove_drafts,
    write_snapshot,
)
from relax_hpc.bus.shards.shard import OpenShards
from relax_hpc.bus.skips import Judge, PlanSkips, check_limit
from relax_hpc.bus.staleness import judging_span, staleness
from relax_hpc.errors import BusError, PeerTimeoutError
from relax_hpc.runtime.files.storage import is_short
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import ColumnWriter

log = logging.getLogger(__name__)


class Deadline:
    """The deadline of a wait that begins now.

    Args:
        is_excused: the wait starts over while it returns True, and while the file system is full.
    """

    def __init__(self, timeout_s: float, is_excused: Callable[[], bool]) -> None:
        self._timeout_s, self._is_excused = timeout_s, is_excused
        self._looks_at, self._at = 0.0, time.monotonic() + timeout_s

    def is_over(self) -> bool:
        """Whether the time is up; safe to call repeatedly."""
        if (now := time.monotonic()) >= self._looks_at:
            self._looks_at = now + self._timeout_s / 100
            if is_short() or self._is_excused():  # producers hold, too
                self._at = now + self._timeout_s
        return now > self._at


def describe_late(intake: Intake, header: BusHeader, wanted: int) -> str:
    """Names each late producer and sidecar writer, and the prompt groups it owes."""
    owed: dict[str, list[int]] = {}
    for guid in find_unplanned(intake, wanted):
        group = intake.waiting.get(guid)
        if group is None:
            owed.setdefault(header.producers[header.deals.folder_of(guid)], []).append(guid)
        else:
            for writer in intake.owners_of_what_lacks(group):
                owed.setdefault(writer, []).append(guid)
    said = []
    for name, guids in owed.items():
        who = _keeper(name, header)
        log = "its log" if who == name else f"its log in {name}"
        said.append(f"{who} owes {guids} ({log} has {intake.num_records(name)} records)")
    return "; ".join(said)


def _keeper(name: str, header: BusHeader) -> str:
    """Returns the writer of a folder, which may be a substitute for a task that is gone."""
    if name not in header.producers:
        return name
    return header.producers[header.deals.task_of(header.producers.index(name))]


def lacks_groups(intake: Intake, wanted: int, *, own: bool) -> bool:
    """Whether some of the groups waited for are uncommitted; else only columns are missing.

    Args:
        own: whether a batch takes its own groups rather than the first that are ready.
    """
    if not own:
        return len(intake.waiting) < wanted
    return any(guid not in intake.waiting for guid in find_unplanned(intake, wanted))


def find_unplanned(intake: Intake, count: int) -> Iterator[int]:
    free = (g for g in itertools.count(intake.planned.below) if g not in intake.planned)
    return itertools.islice(free, count)


POLL_S = 0.02
SNAPSHOT_RECORDS = 1000
"""Records of the plan between snapshots."""
OverAge = Literal["wait", "drop", "mask"]


class _StepPlace(NamedTuple):
    records: int
    fence: int
    end: int
    duplicates: int


class Sequencer:
    """Plans batches and grants credits. Opening it fences every earlier sequencer.

    A planned batch stays planned, whether or not a checkpoint covers it: steps after the checkpoint
    replay the same rows.

    Args:
        position: of the checkpoint to resume; None starts at step 1.
        needs: roles whose sidecar a group needs before it is planned.
        over_age: policy for groups that come late, see the module.
        max_staleness: policy versions that a token may lag behind; `drop` needs it.
        shards: open ones to share with the reader of this process.
        judge: decides which groups teach nothing; None: all are planned.
        most_skipped: limit of skipped groups per step; 0 is any number.

    Raises:
        BusError: not a bus of this format, a damaged plan, or a position that is not on it.
    """

    def __init__(
        self,
        paths: BusPaths,
        *,
        prompts_per_step: int,
        position: PlanPosition | None,
        needs: Sequence[ColumnWriter] = (),
        over_age: OverAge = "wait",
        max_staleness: int = 0,
        keep_steps: int = 0,
        shards: OpenShards | None = None,
        judge: Judge | None = None,
        most_skipped: int = 0,
    ) -> None:
        header = layout.open_bus(paths)
        layout.check_needs(paths, header, needs)
        self._paths, self._header = paths, header
        self._prompts_per_step, self._over_age = prompts_per_step, over_age
        self._max_staleness, self._keep_steps = max_staleness, keep_steps
        self._most_skipped, self._lock = most_skipped, threading.RLock()
        self._span = judging_span(prompts_per_step, max_staleness)
        self.fence = claim_fence(paths)
        self._credits = CreditWriter(paths, self.fence)
        remove_drafts(paths)
        chain = read_chain(paths, below=self.fence, whole=False)
        chain.check(position or PlanPosition(chain.fence, 0, 0))
        self._portions: dict[int, list[PlanRecord]] = {}
        self._places: dict[int, _StepPlace] = {}
        self._base = base = chain.base
        self._num_records = base.records
        if base.step:
            self._places[base.step] = _StepPlace(
                base.records, base.fence, base.end, base.duplicates
            )
        self.duplicates = base.duplicates
        """Trajectories that were committed again and ignored."""
        self._released = base.step
        self._retired = GuidSet(base.planned_below, base.planned_above)
        self._skips = PlanSkips(base)
        self._num_over_age = Counter[int]()
        self._take_over(chain)
        self._log = FrameWriter(paths.plan_log(self.fence))
        self._log.append({"parent": chain.fence, "keep": self._num_records})
        self._shards = shards or OpenShards(paths)
        self._closes = judge is not None and shards is None
        self._intake = Intake(
            paths, header.producers, header.sidecar_writers, needs, chain, self._shards, judge
        )
        self._step = self._returned = position.step if position else 0
        self._cursor = 0
        retired = max(self._credits.inherited.retired_guid_below, self._retired.below)
        self._grant(Credit(self._step, self._step, retired))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> PlanPosition:
        """Returns the end of the last step returned as a whole; goes into the checkpoint."""
        place = self._places.get(self._returned)
        return PlanPosition(self.fence, place.records if place else 0, self._returned)

    @property
    def num_planned(self) -> int:
        return max(self._places, default=0)

    def next_portion(
        self,
        step: int,
        *,
        timeout_s: float,
        min_tokens: float = math.inf,
        may_lack_groups: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> PlanRecord:
        """Returns the next portion of the batch of `step`; `last` marks the end of the batch.

        A planned portion is returned as it was planned. Otherwise waits until ready groups hold
        `min_tokens`, or complete the batch.

        Args:
            step: 1-based; at most one after the end of the plan. A step other than that of the
                previous call starts at its first portion.
            min_tokens: least tokens of a portion; only the last may have fewer.
            may_lack_groups: wait without limit for groups that nobody has committed.
            on_wait: called between polls; an error it raises ends the wait.

        Raises:
            PeerTimeoutError: names the writers that are late.
            BusError: committed records are damaged.
            FencedError: a newer trainer took over.
        """
        self.check_fenced()
        if step != self._step:
            self._step, self._cursor = step, 0
        planned = self._portions.setdefault(step, [])
        if self._cursor == len(planned):
            assert not planned or not planned[-1].last, f"step {step} has no further portion"
            assert step == self.num_planned + 1, f"step {step} of a plan of {self.num_planned}"
            deadline = Deadline(timeout_s, lambda: may_lack_groups and self.lacks_groups())
            while not self._plan_ready(step, min_tokens):
                if deadline.is_over():
                    owed = describe_late(self._intake, self._header, self._num_wanted(step))
                    lacks = f"step {step} lacks prompt groups after {timeout_s:g} s: {owed}"
                    raise PeerTimeoutError(f"{lacks}; see their logs")
                if on_wait is not None:
                    on_wait()
                time.sleep(POLL_S)
        record, self._cursor = planned[self._cursor], self._cursor + 1
        self._returned = step if record.last else self._returned  # else it is still the one before
        return record

    def lacks_groups(self) -> bool:
        """Whether the current step waits for groups that nobody has committed yet."""
        with self._lock:
            wanted, own = self._num_wanted(self._step), self._over_age == "wait"
            return lacks_groups(self._intake, wanted, own=own)

    def look(self) -> None:
        """Reads new commits, and tells producers which of them are skipped.

        `next_portion` does so, too; another thread may call this while a step is trained.

        Raises:
            BusError: committed records are damaged.
            FencedError: a newer trainer took over.
        """
        with self._lock:
            self._poll(self.num_planned + 1)

    def find_skipped(self, step: int) -> list[SkippedGroup]:
        """Returns the groups skipped between the plans of the previous step and of `step`."""
        return self._skips.of_step(step)

    def count_over_age(self, step: int) -> int:
        """Counts the groups that were dropped as over age while `step` was planned."""
        return self._num_over_age[step]

    def advance(self, *, step: int, policy_version: int) -> None:
        """Grants the credits due after `step` was trained and `policy_version` published.

        Raises:
            FencedError: a newer trainer took over; every other grant raises it, too.
        """
        with self._lock:
            self._grant(self._credit._replace(step=step, policy_version=policy_version))

    def release(self, step_covered_by_checkpoint: int) -> None:
        """Lets owners delete the shards of all steps that no resume can need any more.

        Args:
            step_covered_by_checkpoint: of the oldest checkpoint that may still be resumed.
        """
        self.check_fenced()  # the checkpoints may be a newer trainer's, of steps not known here
        released = max(step_covered_by_checkpoint - self._keep_steps, 0)
        with self._lock:
            for step in range(self._released + 1, released + 1):
                self._retired.update(g for record in self._portions[step] for g in record.guids)
                self._skips.retire(step, self._retired)
            self._released = max(released, self._released)
            retired = max(self._credit.retired_guid_below, self._retired.below)
            self._grant(self._credit._replace(retired_guid_below=retired))
            place = self._places.get(self._released)
            if place and place.records >= self._base.records + SNAPSHOT_RECORDS:
                self._sum_up(self._released, place)

    def finish(self) -> None:
        """Tells the producers that nothing more will be trained on."""
        with self._lock:
            self._poll(self._step)
            self._grant(self._credit._replace(finished=True))

    def check_fenced(self) -> None:
        """Raises FencedError if a newer trainer took over; this one must publish nothing more and
        end."""
        self._credits.check_fenced()

    def close(self) -> None:
        self._intake.close()
        self._shards.close()
        self._credits.close()
        self._log.close()

    def _take_over(self, chain: Chain) -> None:
        for record, fence, end in chain.records:
            self._count(record, fence, end)
        for step, portions in self._portions.items():
            wanted = self._num_wanted(step)
            if wanted < 0 or (portions[-1].last and wanted):
                raise BusError(
                    f"{self._paths.plan}: step {step} was planned with "
                    f"{self._prompts_per_step - wanted} prompt groups; schedule.prompts_per_step "
                    f"was not {self._prompts_per_step} then, and cannot change within a run"
                )

    def _count(self, record: AnyRecord, fence: int, end: int) -> None:
        self._num_records += 1
        if isinstance(record, IgnoredShard):
            self.duplicates += record.rows
        if isinstance(record, DroppedGroup) and record.why == "over_age" and record.rows:
            self._num_over_age[record.step] += 1
        if isinstance(record, PlanRecord):
            self._portions.setdefault(record.step, []).append(record)
            if record.last:
                place = _StepPlace(self._num_records, fence, end, self.duplicates)
                self._places[record.step] = place
        if isinstance(record, SkippedGroup):
            self._skips.add(record, self.num_planned + 1)

    def _num_wanted(self, step: int) -> int:
        planned = sum(len(record.guids) for record in self._portions[step])
        return self._prompts_per_step - planned

    def _plan_ready(self, step: int, min_tokens: float) -> bool:
        with self._lock:
            self._poll(step)
            check_limit(step, self._skips.of_step(step), self._most_skipped)
            wanted = self._num_wanted(step)
            ready = [guid for guid in self._candidates(step, wanted) if self._intake.ready(guid)]
            tokens = sum(self._intake.waiting[guid].num_tokens for guid in ready[:wanted])
            enough = len(ready) >= wanted or (ready and tokens >= min_tokens)
            if enough:
                self._plan(step, ready[:wanted])
            return bool(enough)

    def _candidates(self, step: int, wanted: int) -> list[int]:
        """Returns the guids that may be in the batch, lowest first."""
        if self._over_age == "wait":
            return list(find_unplanned(self._intake, wanted))
        waiting = sorted(self._intake.waiting)
        if self._over_age == "drop":
            late = [guid for guid in waiting if self._is_over_age(guid, step)]
            for guid in late:
                for drop in self._intake.drop(guid, step=step):
                    self._append(drop)
            if late:
                self._grant(self._credit)
        return [guid for guid in waiting if guid in self._intake.waiting]

    def _is_over_age(self, guid: int, step: int) -> bool:
        oldest = self._intake.waiting[guid].policy_version_min
        return oldest >= 0 and staleness(step, oldest) > self._max_staleness

    def _plan(self, step: int, guids: list[int]) -> None:
        portion, last = len(self._portions[step]), len(guids) == self._num_wanted(step)
        record = self._intake.record_of(guids, step=step, portion=portion, last=last)
        self._append(record)
        self._intake.mark_planned(record)

    def _poll(self, step: int) -> None:
        """Reads new commits while `step` is being planned.

        Records all groups that the intake passed over, and tells the owners what to sample again.
        """
        self._intake.poll(step)
        if self._closes:  # owners delete what is skipped
            self._shards.close()
        owed = False
        while self._intake.notes:
            note = self._intake.notes.pop(0)
            if isinstance(note, IgnoredShard):
                log.warning("shard %s: %d trajectories were committed before", note.uuid, note.rows)
            self._append(note)
            owed = owed or isinstance(note, DroppedGroup | SkippedGroup)
        if owed or self._intake.find_judged_below(self._span) > self._credit.judged_guid_below:
            self._grant(self._credit)

    def _append(self, record: AnyRecord) -> None:
        self.check_fenced()
        self._log.append(record._asdict())
        self._count(record, self.fence, self._log.end)

    def _grant(self, credit: Credit) -> None:
        owed = tuple(Owed(guid, uuid) for guid, uuid in self._intake.list_owed_again())
        ends = self._skips.batch_ends(
            credit.step + 1,
            self._max_staleness + 2,  # engines may hold the next policy before its credit is here
            self._prompts_per_step,
            decided=self._intake.planned.below,
        )
        judged = self._intake.find_judged_below(self._span)
        self._credit = credit._replace(
            owed=owed, batch_ends=tuple(ends), judged_guid_below=judged, seen=self._intake.seen
        )
        self._credits.write(self._credit)

    def _sum_up(self, step: int, place: _StepPlace) -> None:
        logs = self._intake.retire(self._retired)
        self.check_fenced()
        self._base = PlanSnapshot(
            fence=place.fence,
            records=place.records,
            end=place.end,
            step=step,
            planned_below=self._retired.below,
            planned_above=sorted(self._retired.above),
            dropped=sorted(self._intake.dropped),
            on_record=[
                (uuid, guid, rows)
                for uuid, groups in sorted(self._intake.on_record.items())
                for guid, rows in groups.items()
            ],
            duplicates=place.duplicates,
            logs=logs,
            skipped_below=self._skips.retired.count,
            skipped_above=self._skips.retired.above,
        )
        write_snapshot(self._paths, self._base)
        for old in [old for old in self._portions if old <= step]:
            del self._portions[old]
            self._skips.forget(old)
        for old in [old for old in self._places if old < step]:
            del self._places[old]
