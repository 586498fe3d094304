"""The work of the actor's rank 0 alone: decide batches, serve engines, keep the record."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from relax_hpc.algorithms.groups import Refill
from relax_hpc.bus.plan import PlanPosition, PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.checkpoints.store import Checkpoints
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.training_engine import Gap, Skip
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.lookout import Lookout
from relax_hpc.roles.actor.publishing import Publications
from relax_hpc.roles.dealing.judging import with_skipped
from relax_hpc.roles.dealing.portions import Batch, Portion
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.training import skips
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.pace import PaceMeter, accounted
from relax_hpc.telemetry.progress import step_line
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.publish import Published
from relax_hpc.weights.verify import Verified

log = logging.getLogger(__name__)


class Rank0:
    """The actor's dealings with the bus, the engines and whoever reads the logs: its `Duties`.

    Args:
        checkpoints: of all who train on the rows of the plan.
        is_ending: whether the job is about to end.
        idle: is told whether there is nothing to train on.
        tell_others: tells the other ranks that it waits; called again and again while it does.
    """

    def __init__(
        self,
        config: RunConfig,
        sequencer: Sequencer,
        reader: Reader,
        publisher: Publications,
        checkpoints: Sequence[Checkpoints[PlanPosition]],
        events: EventWriter,
        is_ending: Callable[[], bool] = lambda: False,
        idle: Idle | None = None,
        tell_others: Callable[[], None] = loop.nothing,
    ) -> None:
        self._tell_others = tell_others
        self._config, self._events, self._is_ending = config, events, is_ending
        self._idle = idle or Idle(None)
        self.sequencer, self._publisher, self._checkpoints = sequencer, publisher, checkpoints
        self._reader, self._batch = reader, Batch(config, reader)
        refills = isinstance(config.algorithm.groups, Refill)
        self._lookout = Lookout(sequencer) if refills else None
        self._pace = PaceMeter()
        self._num_bytes = 0
        self._shards: dict[int, str] = {}
        """guid -> shard, of the prompt groups of this step."""

    def next_portion(self, step: int, timers: Timers) -> Portion | None:
        """Deals out the next part of the batch of `step`, once there is enough to start on.

        None if meanwhile engines came that have to be given the current weights first, or the job
        is about to end.
        """
        if self._lookout:
            self._lookout.check()
        try:
            with timers("wait", waits=True):
                record = self.sequencer.next_portion(
                    step,
                    min_tokens=self._config.tokens_per_portion,
                    timeout_s=self._config.launch.peer_timeout_s,
                    may_lack_groups=self._config.launch.layout == "separate",
                    on_wait=self._look_up,
                )
        except _Interrupted:
            return None
        self._idle.note(idle=False)
        with timers("read"):
            self._note_shards(record)
            return self._batch.deal(record)

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """Gives engines the weights; compares them if it is time to.

        Returns:
            Whether some are left that have to be given them.
        """
        self.sequencer.check_fenced()
        published = self._publisher.publish(
            version, tensors, check=self._is_checked(version), check_fenced=self.check_fenced
        )
        self.sequencer.advance(step=version, policy_version=version)
        self._num_bytes = published.num_bytes
        self._note(published)
        again = published.again
        if version == self._config.schedule.num_steps and not again:
            # Nobody looks for newcomers any more, and the last policy is to be evaluated.
            again = self._publisher.wait_for_loads()
        self._note_loads()
        return again

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        """Logs the step, and what its batch was like."""
        fields = {**self._batch.describe(step), **fields, **timers.seconds}
        if self._lookout:
            fields |= with_skipped(fields, self.sequencer.skipped_for(step), self._config)
        num_steps = self._config.schedule.num_steps
        fields |= accounted(seconds := timers.elapsed, fields)
        fields["tokens_per_s"] = fields["num_tokens"] / seconds
        eta_s = self._pace.end_step(seconds, num_steps - step)
        self._events.emit("step", step=step, eta_s=eta_s, **fields)
        self._events.emit("phases", step=step, phases=timers.phases)
        log.info("%s", step_line({"step": step, **fields}, num_steps, eta_s))

    def compared(self, step: int, gap: Gap, limit: float) -> None:
        """Notes how far the engines' logprobs are from the trainer's.

        Args:
            step: that has been trained last.
        """
        self._events.emit(
            "engine_gap", step=step + 1, policy_version=step, num_tokens=gap.num_tokens,
            mean=gap.mean, max=gap.max, k3=gap.k3, limit=limit,
        )  # fmt: skip
        log.info(
            "engines and trainer: logprobs of %d tokens of policy %d differ by %.2g nats on "
            "average, %.2g at most (limit of the average %g)",
            gap.num_tokens, step, gap.mean, gap.max, limit,
        )  # fmt: skip

    def place_of(self, guid: int) -> tuple[str, str]:
        """Shard of a prompt group of this step, and the engine that its writer names."""
        name = self._shards[guid]
        with Shard(self._config.run_dir / name) as shard:
            return name, str(shard.attributes["engine"])

    def skipped(self, step: int, skip: Skip) -> None:
        """Says which samples kept the update from being done, and where they are."""
        self._events.emit("skipped", step=step, **skips.fields_of(skip, self._shards))
        log.warning("step %d: update skipped: %s", step, skips.line_of(skip, self._shards))

    @property
    def position(self) -> PlanPosition:
        """The end of the step that was trained last."""
        return self.sequencer.position

    def check_fenced(self) -> None:
        """Raises FencedError if another trainer took over; also called from another thread."""
        self.sequencer.check_fenced()

    def release(self) -> None:
        """Lets owners delete what not even the oldest checkpoint that is kept can need.

        The critic learns from the same rows: what it has no checkpoint behind stays, too.
        """
        steps = [found[0].step if (found := c.complete()) else 0 for c in self._checkpoints]
        self.sequencer.release(min(steps))

    def finish(self) -> None:
        self.sequencer.finish()
        self._events.emit("end", duplicates=self.sequencer.duplicates)

    def close(self) -> None:
        if self._lookout:
            self._lookout.close()
        self._publisher.close()
        self.sequencer.close()

    def _note_shards(self, record: PlanRecord) -> None:
        if record.portion == 0:
            self._shards, self._batch = {}, Batch(self._config, self._reader)
        bus = RunPaths(self._config.run_dir).bus
        for guid, part in zip(record.guids, record.parts, strict=True):
            shard = bus.shard(part.producer, part.fence, part.seq)
            self._shards[guid] = str(shard.relative_to(self._config.run_dir))

    def _is_checked(self, version: int) -> bool:
        every = self._config.weights.checksum_every
        is_last = version == self._config.schedule.num_steps
        return version > 0 and (is_last or (every > 0 and version % every == 0))

    def _note(self, published: Published) -> None:
        fields = published._asdict()
        times = {f"sync/{name}": spent for name, spent in fields.pop("seconds").items()}
        if published.members:
            times["sync/paused"] = published.pause_seconds
            moved = times.get("sync/wire") or times.get("sync/load") or math.inf
            times["sync/gb_per_s"] = published.num_bytes / 1e9 / moved
        if "sync/write" in times:
            times["sync/write_gb_per_s"] = published.num_bytes / 1e9 / times["sync/write"]
        del fields["verified"]
        self._events.emit("publish", step=published.version, **fields, **times)
        self._note_verified(published.version, published.verified)

    def _note_loads(self) -> None:
        for loaded in self._publisher.ended_loads():
            times = {f"sync/{name}": spent for name, spent in loaded.seconds.items()}
            if times:
                times["sync/paused"] = sum(loaded.seconds.values())
                times["sync/gb_per_s"] = self._num_bytes / 1e9 / times["sync/load"]
            members, fenced = [loaded.member.id], list[str]()
            if loaded.reason:
                members, fenced = fenced, members
            self._events.emit(
                "loaded", step=loaded.version, version=loaded.version, members=members,
                fenced=fenced, num_bytes=self._num_bytes, error=loaded.reason,
                phases=loaded.phases, **times,
            )  # fmt: skip
            self._note_verified(loaded.version, loaded.verified)

    def _note_verified(self, version: int, verified: Verified | None) -> None:
        if verified is None:
            return
        self._events.emit("verify", version=version, **verified._asdict())
        if not verified.equal:
            log.error("engines hold other weights than the trainer: %s", verified)

    def _look_up(self) -> None:
        self._tell_others()
        self._idle.note(idle=self.sequencer.lacks_groups())
        self._note_loads()
        if self._publisher.has_newcomers() or self._is_ending():
            raise _Interrupted


class _Interrupted(Exception):  # noqa: N818
    """Something else has to be done first, by all ranks."""
