"""Does the work of the actor's rank 0 alone: decide batches, serve engines, keep the record.

A poller reads new commits while rank 0 trains, so that skipped groups are replaced in time. A check
compares engine and trainer logprobs once per start, before the first update. After the last step
the trainer stays available until rollout has evaluated the last policy: an engine that restarts
then, alone or with the whole job, starts with the initial weights.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from relax_hpc.algorithms.groups import Refill
from relax_hpc.bus.plan import PlanPosition, PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import MismatchError, PeerTimeoutError
from relax_hpc.roles.dealing.portions import Batch, Portion, name_shards, with_skipped
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.rollout.heldout import Due, ScoreBoard, awaited_at, last_of
from relax_hpc.roles.training.duties import Duties, StepRecord, note_skipped, nothing
from relax_hpc.roles.training.unlearned import FIRST, Teller, fields_of
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.trainer.checkpoints.store import Checkpoints
from relax_hpc.trainer.training_engine import LogprobGap, SkippedUpdate, TrainingEngine
from relax_hpc.weights.publish import Published, Publisher
from relax_hpc.weights.pull_snapshot import SnapshotPublisher
from relax_hpc.weights.transport import DigestComparison

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
LAST_LOOK_EVERY_S = 2.0
"""Interval of polling whether the last policy is evaluated."""
_RESTS = 10.0
"""Pause after a poll, in multiples of its duration: with many producers there are fewer polls."""


Publications = Publisher | SnapshotPublisher


class Lookout:
    """Polls the sequencer until it is closed or a poll fails."""

    def __init__(self, sequencer: Sequencer, *, every_s: float = LOOK_EVERY_S) -> None:
        self._sequencer, self._every_s = sequencer, every_s
        self._end = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends polling, and waits for a running poll."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        took = 0.0
        while not self._end.wait(max(self._every_s, _RESTS * took)):
            begun = time.monotonic()
            try:
                self._sequencer.look()
            except Exception as error:  # noqa: BLE001 - the outermost frame of a thread
                self._failure = error
                return
            took = time.monotonic() - begun


class ActorRank0(Duties[Portion]):
    """Connects the actor with bus, engines and logs: see `loop.run`.

    Args:
        checkpoints: of all components that train on the plan's rows.
        is_ending: whether the job is about to end.
        idle: told whether there is anything to train on.
        tell_others: called repeatedly during a wait, to keep the other ranks waiting.
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
        tell_others: Callable[[], None] = nothing,
    ) -> None:
        self._tell_others = tell_others
        self._config, self._events, self._is_ending = config, events, is_ending
        self._idle = idle or Idle(None)
        self.sequencer, self._publisher, self._checkpoints = sequencer, publisher, checkpoints
        self._reader, self._batch = reader, Batch(config, reader)
        refills = isinstance(config.algorithm.groups, Refill)
        self._lookout = Lookout(sequencer) if refills else None
        self._teller = Teller(config)
        self._record = StepRecord(events, config.schedule.num_steps, self._teller)
        self._num_bytes = 0
        self._shards: dict[int, str] = {}
        """guid -> shard, for the prompt groups of this step."""

    def next_task(self, step: int, timers: Timers) -> Portion | None:
        """Deals out the next part of the batch of `step`, once there is enough to start on.

        None if engines came meanwhile and need the current weights first, or the job is about to
        end.
        """
        if self._lookout:
            self._lookout.check()
        try:
            with timers("wait", waits=True):
                self._wait_for_scores(step - 1)
                record = self.sequencer.next_portion(
                    step,
                    min_tokens=self._config.tokens_per_portion,
                    timeout_s=self._config.launch.advanced.peer_timeout_s,
                    may_lack_groups=self._config.launch.layout == "separate",
                    on_wait=partial(self._look_up, step),
                )
        except _Interrupted:
            return None
        self._idle.note(idle=False)
        with timers("read"):
            self._note_shards(record)
            return self._batch.deal(record)

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """Gives engines the weights; compares digests if a check is due.

        Returns:
            Whether engines are left that need the weights.
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
        fields = {**self._batch.describe(step), **fields}
        if self._lookout:
            fields |= with_skipped(fields, self.sequencer.find_skipped(step), self._config)
        if self._config.schedule.over_age == "drop":
            fields["staleness/over_age"] = self._share_dropped(step, fields)
        fields |= fields_of(fields, self._config)
        self._record.end_step(step, fields, timers)

    def _share_dropped(self, step: int, fields: Mapping[str, float]) -> float:
        """Returns which part of the groups for a batch was dropped, since they were over age."""
        dropped = self.sequencer.count_over_age(step)
        sampled = self._config.schedule.prompts_per_step + fields.get("groups/skipped", 0)
        return dropped / (dropped + sampled)

    def note_gap(self, step: int, gap: LogprobGap, limit: float) -> None:
        """Logs the gap between the engines' logprobs and the trainer's.

        Args:
            step: trained last.
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
        """Returns the shard of a prompt group of this step, and the engine that its writer
        names."""
        name = self._shards[guid]
        with Shard(self._config.run_dir / name) as shard:
            return name, str(shard.attributes["engine"])

    def note_skipped(self, step: int, skip: SkippedUpdate) -> None:
        note_skipped(self._events, step, skip, self._shards)

    @property
    def position(self) -> PlanPosition:
        return self.sequencer.position

    def check_fenced(self) -> None:
        """Raises FencedError if another trainer took over; also called from another thread."""
        self.sequencer.check_fenced()

    def release(self) -> None:
        """Lets owners delete shards that not even the oldest kept checkpoint can need.

        The critic learns from the same rows, so its checkpoints count as well.
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

    def _wait_for_scores(self, version: int) -> None:
        """Leaves engines their policy until the evaluations are sampled that are to be of it
        alone."""
        if not (dues := awaited_at(self._config, version)):
            return
        owed = OwedScores(self._config, RunPaths(self._config.run_dir), dues)
        begun = time.monotonic()
        while owed.look():
            took = time.monotonic() - begun
            self._look_around()
            time.sleep(max(LOOK_EVERY_S, _RESTS * took))
            begun = time.monotonic()

    def _note_shards(self, record: PlanRecord) -> None:
        if record.portion == 0:
            self._shards, self._batch = {}, Batch(self._config, self._reader)
        self._shards |= name_shards(self._config.run_dir, record.guids, record.parts)

    def _is_checked(self, version: int) -> bool:
        every = self._config.weights.advanced.checksum_every
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
        for loaded in self._publisher.take_ended_loads():
            loaded.emit(self._events, self._num_bytes)
            self._note_verified(loaded.version, loaded.verified)

    def _note_verified(self, version: int, verified: DigestComparison | None) -> None:
        if verified is None:
            return
        self._events.emit("verify", version=version, **verified._asdict())
        if not verified.equal:
            log.error("engines hold other weights than the trainer: %s", verified)

    def _look_up(self, step: int) -> None:
        self._idle.note(idle=self.sequencer.lacks_groups())
        skipped = self.sequencer.find_skipped(step) if self._lookout and step <= FIRST else []
        for line in self._teller.note_skipped(step, skipped):
            log.warning("%s", line)
        self._look_around()

    def _look_around(self) -> None:
        self._tell_others()
        self._note_loads()
        if self._publisher.has_newcomers() or self._is_ending():
            raise _Interrupted


class _Interrupted(Exception):  # noqa: N818
    """All ranks have to do something else first."""


class LogprobCheck:
    """Called by every rank before each update, until a batch could be compared.

    Only policy 0 can fail the run. With a later policy, engines may still hold keys and values of
    prompts from older policies, so after a resume a mismatch is only a warning.

    Args:
        rank0: keeps the record and knows the places of rows; None on other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainingEngine,
        rank0: ActorRank0 | None = None,
    ) -> None:
        self._config, self._trainer, self._rank0 = config, trainer, rank0
        self._is_done = False

    def __call__(self) -> None:
        """Raises:
        MismatchError: the engines' logprobs and the trainer's differ by more than rounding."""
        if self._is_done:
            return
        gap = self._trainer.engine_gap()
        # Of numbers that are not finite the update is skipped, with the samples named.
        if gap is None or not math.isfinite(gap.mean):
            return
        self._is_done = True
        limit = self._config.max_logprob_gap
        if self._rank0:
            self._rank0.note_gap(self._trainer.step, gap, limit)
        if gap.mean <= limit:
            return
        if self._trainer.step == 0:
            raise MismatchError(self._line(gap, limit))
        if self._rank0:
            log.warning("%s", self._line(gap, limit))

    def _line(self, gap: LogprobGap, limit: float) -> str:
        config, worst = self._config, gap.worst
        nowhere = ("", config.rollout_pool.kind)
        shard, engine = self._rank0.place_of(worst.guid) if self._rank0 else nowhere
        engine_type = config.rollout_pool.args.get("dtype", config.model.dtype)
        weights = f", weights in {config.weights.quantize}" * (config.weights.quantize != "none")
        return (
            f"engines ({engine}, {engine_type}{weights}) and trainer (Megatron-core, "
            f"{config.model.dtype}) compute different models: the logprobs of {gap.num_tokens} "
            f"tokens that policy {self._trainer.step} sampled differ by {gap.mean:.3g} nats on "
            f"average (largest {gap.max:.3g}, k3 {gap.k3:.3g}), and rounding explains "
            f"{limit:g} (weights.advanced.max_logprob_gap); most for token {worst.token} of "
            f"guid/sibling {worst.guid}/{worst.sibling}{f' in {shard}' * bool(shard)}: "
            f"{worst.engine:.4f} by the engine, {worst.trainer:.4f} by the trainer. A restart does "
            "not help: compare model.path, model.weights and engines.rollout.args, or raise the "
            "limit"
        )


class OwedScores:
    """Polls whether evaluations of a policy are outstanding.

    Args:
        config: of the run; rollout in a job of its own loads policies by itself.
        dues: the evaluations.
    """

    def __init__(self, config: RunConfig, paths: RunPaths, dues: Sequence[Due]) -> None:
        self._patience_s, self._dues = config.launch.advanced.peer_timeout_s, dues
        size = config.rollout_pool.num_hosts
        tasks = range(size) if config.launch.layout != "separate" else ()
        self._owing = {rank: ScoreBoard(paths, rank, size) for rank in tasks}
        self._kept, self._since = dict[int, int | None](), time.monotonic()

    def look(self) -> bool:
        """Returns whether any task owes a score.

        Raises:
            PeerTimeoutError: no prompt was scored for `launch.advanced.peer_timeout_s`.
        """
        kept = {rank: board.count_kept_bytes(self._dues) for rank, board in self._owing.items()}
        now = time.monotonic()
        if kept != self._kept:
            self._kept, self._since = kept, now
        self._owing = {rank: b for rank, b in self._owing.items() if kept[rank] is not None}
        if self._owing and now - self._since > self._patience_s:
            tasks = ", ".join(f"rollout-{rank}" for rank in self._owing)
            which = "last policy" if self._dues[0].when == "after" else "evaluated policy"
            raise PeerTimeoutError(
                f"the {which}: {tasks} scored no held-out prompt for {self._patience_s:g} s; "
                "see their logs"
            )
        return bool(self._owing)


class LastPolicy:
    """Waits for the evaluations of the last policy.

    Args:
        tell_others: called repeatedly during a wait, to keep the other ranks waiting.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        publisher: Publications,
        tell_others: Callable[[], None] = nothing,
    ) -> None:
        self._publisher, self._tell_others = publisher, tell_others
        self._owed = OwedScores(config, paths, last_of(config))

    def wait_for_wanted(self) -> Literal["publish", "end"]:
        """Waits for an engine or for the last score.

        Raises:
            PeerTimeoutError: no prompt was scored for `launch.advanced.peer_timeout_s`.
        """
        while self._owed.look():
            if self._publisher.has_newcomers():
                return "publish"
            self._tell_others()
            time.sleep(LAST_LOOK_EVERY_S)
        return "end"
