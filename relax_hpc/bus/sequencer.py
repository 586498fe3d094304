"""The one place with a total order: turns what producers committed into batches, once.

Lives in rank 0 of the trainer. Batches go by prompt ordinal: batch b is the guids
(b-1) P <= guid < b P. That bounds staleness by construction, and a replay is exact.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Self

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit, CreditWriter
from relax_hpc.bus.frames import FrameWriter
from relax_hpc.bus.intake import Intake
from relax_hpc.bus.plan import (
    Chain,
    IgnoredShard,
    PlanPosition,
    PlanRecord,
    claim_epoch,
    newest_epoch,
    read_chain,
)
from relax_hpc.errors import BusError, PeerTimeoutError
from relax_hpc.paths import BusPaths

log = logging.getLogger(__name__)

POLL_S = 0.02


class Sequencer:
    """Plans batches, grants credits. Opening it fences every earlier sequencer.

    What was planned stays planned, whether or not a checkpoint covers it: steps after the
    checkpoint replay the same rows.

    Args:
        paths: a bus that `layout.create` made.
        producers: in order; producer r of R owns the guids with guid % R == r.
        prompts_per_step: P, the prompt groups of a batch.
        position: from the checkpoint that is resumed; None starts at step 1.

    Raises:
        BusError: not a bus of this format, a damaged plan, or a position that is not on it.
    """

    def __init__(
        self,
        paths: BusPaths,
        producers: Sequence[str],
        *,
        prompts_per_step: int,
        position: PlanPosition | None,
    ) -> None:
        layout.open_bus(paths)
        self._paths = paths
        self._producers = list(producers)
        self._prompts_per_step = prompts_per_step
        self.epoch = claim_epoch(paths)
        chain = read_chain(paths, below=self.epoch)
        if position is not None:
            chain.check(position)
        self._check_batches(chain)
        self._steps = chain.steps
        self._ends = [i + 1 for i, r in enumerate(chain.records) if isinstance(r, PlanRecord)]
        self._num_records = len(chain.records)
        self.duplicates = sum(shard.rows for shard in chain.ignored)
        """Trajectories that were committed again and ignored."""
        self._log = FrameWriter(paths.plan_log(self.epoch))
        self._log.append({"parent": chain.epoch, "keep": self._num_records})
        self._intake = Intake(paths, producers, self._steps, chain.ignored)
        self._step = 0 if position is None else position.step
        self._credits = CreditWriter(paths, self.epoch)
        self._grant(Credit(self._step, self._step, self._step * prompts_per_step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> PlanPosition:
        """Where the last returned batch is in the plan; goes into the checkpoint."""
        records = self._ends[self._step - 1] if self._step else 0
        return PlanPosition(self.epoch, records, self._step)

    def next_batch(
        self, step: int, *, timeout_s: float, on_wait: Callable[[], None] | None = None
    ) -> PlanRecord:
        """The batch of `step`: as it was planned once, else planned as soon as it is committed.

        Args:
            step: 1-based; at most one behind the end of the plan.
            timeout_s: how long to wait for the producers.
            on_wait: called between polls; what it raises ends the wait.

        Raises:
            PeerTimeoutError: names the producers that did not commit their prompt groups.
            BusError: a shard is damaged, or a newer trainer took over.
        """
        assert 1 <= step <= len(self._steps) + 1, f"step {step} of a plan of {len(self._steps)}"
        if step > len(self._steps):
            self._wait(step, time.monotonic() + timeout_s, timeout_s, on_wait)
            self._plan(step)
        self._step = step
        return self._steps[step - 1]

    def advance(self, *, step: int, policy_version: int) -> None:
        """Grants what follows from `step` being trained and `policy_version` being published.

        Raises:
            BusError: a newer trainer took over; so does every other grant.
        """
        self._grant(self._credit._replace(step=step, policy_version=policy_version))

    def release(self, step_covered_by_checkpoint: int) -> None:
        """Lets owners delete the shards of all steps that no resume can need any more.

        Args:
            step_covered_by_checkpoint: of the oldest checkpoint that may still be resumed.
        """
        retired = step_covered_by_checkpoint * self._prompts_per_step
        self._grant(self._credit._replace(retired_guid_below=retired))

    def finish(self) -> None:
        """Tells the producers that nothing more will be trained on."""
        self._intake.poll()
        self._note_ignored()
        self._grant(self._credit._replace(finished=True))

    def check_fenced(self) -> None:
        """Raises:
        BusError: a newer trainer took over; this one must publish nothing more and end.
        """
        newest = newest_epoch(self._paths)
        if newest != self.epoch:
            raise BusError(
                f"{self._paths.plan}: epoch {newest} was claimed after {self.epoch}; "
                "another trainer took over, this one must end"
            )

    def close(self) -> None:
        self._intake.close()
        self._credits.close()
        self._log.close()

    def _guids(self, step: int) -> range:
        return range((step - 1) * self._prompts_per_step, step * self._prompts_per_step)

    def _check_batches(self, chain: Chain) -> None:
        for step, record in enumerate(chain.steps, start=1):
            if (record.step, record.guids) != (step, list(self._guids(step))):
                raise BusError(
                    f"{self._paths.plan}: step {record.step} was planned as prompt groups "
                    f"{record.guids[0]}..{record.guids[-1]}; algorithm.prompts_per_step was not "
                    f"{self._prompts_per_step} then, and cannot change within a run"
                )

    def _wait(
        self, step: int, deadline: float, timeout_s: float, on_wait: Callable[[], None] | None
    ) -> None:
        while True:
            self._intake.poll()
            missing = [g for g in self._guids(step) if g not in self._intake.waiting]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise PeerTimeoutError(self._explain(step, missing, timeout_s))
            if on_wait is not None:
                on_wait()
            time.sleep(POLL_S)

    def _explain(self, step: int, missing: list[int], timeout_s: float) -> str:
        owners: dict[str, list[int]] = {}
        for guid in missing:
            owners.setdefault(self._producers[guid % len(self._producers)], []).append(guid)
        lacks = "; ".join(
            f"{name} owes {guids} (its log has {self._intake.num_records(name)} records)"
            for name, guids in owners.items()
        )
        return f"step {step} lacks prompt groups after {timeout_s:g} s: {lacks}; see their logs"

    def _plan(self, step: int) -> None:
        self._note_ignored()
        groups = [self._intake.waiting[guid] for guid in self._guids(step)]
        sampled = [g.policy_version_min for g in groups if g.policy_version_min >= 0]
        record = PlanRecord(
            step=step,
            guids=list(self._guids(step)),
            parts=[group.part for group in groups],
            num_trajectories=sum(group.part.hi - group.part.lo for group in groups),
            policy_version_min=min(sampled, default=-1),
        )
        self._append(record)
        self._steps.append(record)
        self._ends.append(self._num_records)
        self._intake.mark_planned(record)

    def _note_ignored(self) -> None:
        while self._intake.ignored:
            shard = self._intake.ignored.pop(0)
            self.duplicates += shard.rows
            log.warning("shard %s: %d trajectories were committed before", shard.uuid, shard.rows)
            self._append(shard)

    def _append(self, record: PlanRecord | IgnoredShard) -> None:
        self.check_fenced()
        self._log.append(record._asdict())
        self._num_records += 1

    def _grant(self, credit: Credit) -> None:
        self.check_fenced()
        self._credit = credit
        self._credits.write(credit)
