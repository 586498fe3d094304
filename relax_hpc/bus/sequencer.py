"""The one place with a total order: turns what was committed into batches, once.

Lives in rank 0 of the trainer. What happens to a group that comes late is the over-age policy:

* wait: batch b is the guids (b-1) P <= guid < b P. No token is older than the rollout's pacing
  allows; the slowest group of a batch holds up its step.
* drop: batch b is the first P groups that are there, lowest guid first. One that would be trained
  on too late is dropped, and its owner samples the prompt again.
* mask: as drop, but its over-age tokens leave the loss instead.

A group that teaches nothing is skipped as soon as it comes, so b P counts those that are not.

Every decision is a record of the plan, so a replay is exact under each of them.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit, CreditWriter, Owed
from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.intake import Intake
from relax_hpc.bus.lateness import Deadline, lacks_groups, owed_by, unplanned
from relax_hpc.bus.plan import (
    AnyRecord,
    Chain,
    DroppedGroup,
    IgnoredShard,
    PlanPosition,
    PlanRecord,
    SkippedGroup,
    claim_fence,
    read_chain,
)
from relax_hpc.bus.shards.open_shards import OpenShards
from relax_hpc.bus.skips import Judge, Skips, check_limit
from relax_hpc.bus.snapshot import GuidSet, Snapshot, remove_drafts, write_snapshot
from relax_hpc.bus.staleness import judging_span, staleness
from relax_hpc.errors import BusError, PeerTimeoutError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import Role

log = logging.getLogger(__name__)

POLL_S = 0.02
SNAPSHOT_RECORDS = 1000
"""Records of the plan between snapshots."""
OverAge = Literal["wait", "drop", "mask"]


class _Place(NamedTuple):
    """The place of a step's last record."""

    records: int
    fence: int
    end: int
    duplicates: int


class Sequencer:
    """Plans batches, grants credits. Opening it fences every earlier sequencer.

    What was planned stays planned, whether or not a checkpoint covers it: steps after the
    checkpoint replay the same rows.

    Args:
        paths: a bus that `layout.create` made.
        prompts_per_step: P, the prompt groups of a batch.
        position: from the checkpoint that is resumed; None starts at step 1.
        needs: roles whose sidecar a group must have before it is planned.
        over_age: what happens to groups that come late, see above.
        max_staleness: policy versions that a token may lag behind; `drop` needs it.
        keep_steps: shards of that many steps are kept longer than any resume needs them.
        shards: open ones to share with the reader of this process.
        judge: says which groups teach nothing; None: all are planned.
        most_skipped: groups that may be skipped for one step; 0 is any number.

    Raises:
        BusError: not a bus of this format, a damaged plan, or a position that is not on it.
    """

    def __init__(
        self,
        paths: BusPaths,
        *,
        prompts_per_step: int,
        position: PlanPosition | None,
        needs: Sequence[Role] = (),
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
        self._places: dict[int, _Place] = {}
        self._base = base = chain.base
        self._num_records = base.records
        if base.step:
            self._places[base.step] = _Place(base.records, base.fence, base.end, base.duplicates)
        self.duplicates = base.duplicates
        """Trajectories that were committed again and ignored."""
        self._released = base.step
        self._retired = GuidSet(base.planned_below, base.planned_above)
        self._skips = Skips(base)
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
        """The end of the last step that was returned as a whole; goes into the checkpoint."""
        place = self._places.get(self._returned)
        return PlanPosition(self.fence, place.records if place else 0, self._returned)

    @property
    def num_planned(self) -> int:
        """Steps whose batch is planned as a whole."""
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
        """The next portion of the batch of `step`; its `last` says that it completes the batch.

        As it was planned once; else as soon as groups that are ready hold `min_tokens`, or
        complete the batch.

        Args:
            step: 1-based; at most one behind the end of the plan. A step that was not asked for
                just before starts at its first portion.
            timeout_s: how long to wait for what is missing.
            min_tokens: tokens that a portion should have at least; only the last may have fewer.
            may_lack_groups: those that nobody has committed are waited for without end.
            on_wait: called between polls; what it raises ends the wait.

        Raises:
            PeerTimeoutError: names who did not commit what.
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
                    owed = owed_by(self._intake, self._header, self._num_wanted(step))
                    lacks = f"step {step} lacks prompt groups after {timeout_s:g} s: {owed}"
                    raise PeerTimeoutError(f"{lacks}; see their logs")
                if on_wait is not None:
                    on_wait()
                time.sleep(POLL_S)
        record, self._cursor = planned[self._cursor], self._cursor + 1
        self._returned = step if record.last else self._returned  # else it is still the one before
        return record

    def lacks_groups(self) -> bool:
        """Whether the present step waits for groups that nobody has committed yet."""
        with self._lock:
            wanted, own = self._num_wanted(self._step), self._over_age == "wait"
            return lacks_groups(self._intake, wanted, own=own)

    def look(self) -> None:
        """Takes note of what has been committed, and tells producers what of it is skipped.

        `next_portion` does so, too; another thread may call this while a step is trained.

        Raises:
            BusError: committed records are damaged.
            FencedError: a newer trainer took over.
        """
        with self._lock:
            self._poll(self.num_planned + 1)

    def skipped_for(self, step: int) -> list[SkippedGroup]:
        """The groups that were skipped between the plans of the step before and of `step`."""
        return self._skips.of_step(step)

    def advance(self, *, step: int, policy_version: int) -> None:
        """Grants what follows from `step` being trained and `policy_version` being published.

        Raises:
            FencedError: a newer trainer took over; so does every other grant.
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
        """Raises FencedError if a newer trainer took over: this one publishes nothing, and ends."""
        self._credits.check_fenced()

    def close(self) -> None:
        self._intake.close()
        self._shards.close()
        self._credits.close()
        self._log.close()

    def _take_over(self, chain: Chain) -> None:
        """Continues what was planned before."""
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
        """Takes note of a record at the end of the plan."""
        self._num_records += 1
        if isinstance(record, IgnoredShard):
            self.duplicates += record.rows
        if isinstance(record, PlanRecord):
            self._portions.setdefault(record.step, []).append(record)
            if record.last:
                place = _Place(self._num_records, fence, end, self.duplicates)
                self._places[record.step] = place
        if isinstance(record, SkippedGroup):
            self._skips.add(record, self.num_planned + 1)

    def _num_wanted(self, step: int) -> int:
        """Prompt groups that the batch of `step` lacks."""
        planned = sum(len(record.guids) for record in self._portions[step])
        return self._prompts_per_step - planned

    def _plan_ready(self, step: int, min_tokens: float) -> bool:
        """Plans the next portion, unless there is too little for one."""
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
        """Guids that may be in the batch, lowest first."""
        if self._over_age == "wait":
            return list(unplanned(self._intake, wanted))
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
        """Looks at what has come in while `step` is being planned.

        Puts what the intake passed over on record, and tells the owners what they owe.
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
        if owed or self._intake.judged_below(self._span) > self._credit.judged_guid_below:
            self._grant(self._credit)

    def _append(self, record: AnyRecord) -> None:
        self.check_fenced()
        self._log.append(record._asdict())
        self._count(record, self.fence, self._log.end)

    def _grant(self, credit: Credit) -> None:
        owed = tuple(Owed(guid, uuid) for guid, uuid in self._intake.owed_again())
        ends = self._skips.batch_ends(
            credit.step + 1,
            self._max_staleness + 2,  # engines may hold the next policy before its credit is here
            self._prompts_per_step,
            decided=self._intake.planned.below,
        )
        judged = self._intake.judged_below(self._span)
        self._credit = credit._replace(
            owed=owed, batch_ends=tuple(ends), judged_guid_below=judged, seen=self._intake.seen
        )
        self._credits.write(self._credit)

    def _sum_up(self, step: int, place: _Place) -> None:
        logs = self._intake.retire(self._retired)
        self.check_fenced()
        self._base = Snapshot(
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
