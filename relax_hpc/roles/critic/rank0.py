"""The work of rank 0 alone in the critic: follow plan and bus, deal out, write, keep the record."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.follower import PlanFollower, PlannedBatch
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.training_engine import Skip
from relax_hpc.paths import RunPaths
from relax_hpc.roles.critic.loop import Floats, Lesson
from relax_hpc.roles.dealing.micro_batches import plan_micro_batches
from relax_hpc.roles.dealing.portions import lengths_of, shards_of, values_of
from relax_hpc.roles.scorer import rank0 as scorer
from relax_hpc.roles.scorer.loop import Round
from relax_hpc.roles.training import skips
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.pace import accounted
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)


class Rank0:
    """The critic's dealings with the bus, and its record: its `Duties`.

    Args:
        config: the run.
        writer: of values.
        reader: of this rank.
        credits: of the trainer; every look of theirs is fresh.
        plan: behind the step that the critic has trained last.
        scoring: chooses the shards that lack values, and commits these.
        is_ending: whether the job is about to end.
    """

    def __init__(
        self,
        config: RunConfig,
        writer: SidecarWriter,
        reader: Reader,
        credits: CreditTail,
        plan: PlanFollower,
        scoring: scorer.Rank0,
        events: EventWriter,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        assert config.critic is not None
        self._config, self._megatron = config, config.critic.megatron(config.actor)
        self._writer, self._reader, self._credits = writer, reader, credits
        self._plan, self._scoring, self._events = plan, scoring, events
        self._waited, self._is_ending = Timers(), is_ending
        self._shards: dict[int, str] = {}
        """guid -> shard, of the prompt groups of this step."""

    def next_task(self, step: int) -> Lesson | Round | None:
        """See `Duties`."""
        self._waited, deadline = Timers(), time.monotonic() + scorer.SIGN_OF_LIFE_S
        with self._waited("wait", waits=True):
            while True:
                credit = self._credits.latest()
                if credit and credit.finished and step == self._config.num_steps:
                    return None
                if self._is_ending():
                    return self._scoring.begin([], self._waited)
                # Shards first: what was planned before they were committed is then seen, too.
                shards = self._scoring.ready(credit)
                batch = self._plan.next_batch()
                if batch or shards or time.monotonic() > deadline:
                    break
                time.sleep(scorer.POLL_S)
        if batch is None:
            return self._scoring.begin(shards, self._waited)
        assert batch.step == step + 1, f"batch {batch.step} comes after step {step}"
        return self._deal(batch)

    def put(self, values: Sequence[Floats], *, version: int) -> None:
        self._scoring.put(values, version=version)

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        """Logs the step: how far its values were from what came of the states."""
        fields = {**_explained(fields), **timers.seconds, **self._waited.seconds}
        fields.pop("entropy", None)
        fields |= accounted(self._waited.elapsed, fields)
        self._events.emit("critic_step", step=step, **fields)
        self._events.emit("phases", step=step, phases=[*self._waited.phases, *timers.phases])
        log.info(
            "step %d/%d | value loss %.4f | explained %.3f | value %.3f of %.3f | %s",
            step, self._config.num_steps, fields["loss"], fields["value/explained"],
            fields["value/mean"], fields["value/return"], timers,
        )  # fmt: skip

    def skipped(self, step: int, skip: Skip) -> None:
        self._events.emit("skipped", step=step, **skips.fields_of(skip, self._shards))
        log.warning("step %d: update skipped: %s", step, skips.line_of(skip, self._shards))

    @property
    def position(self) -> PlanPosition:
        """The end of the step that was trained last."""
        return self._plan.position

    def check_fenced(self) -> None:
        """Raises FencedError if another critic took over; also called from another thread."""
        self._writer.check_fenced()

    def release(self) -> None:
        """Does nothing: the actor looks at both of their checkpoints, and releases."""

    def close(self) -> None:
        self._plan.close()
        self._scoring.close()

    def _deal(self, batch: PlannedBatch) -> Lesson:
        """Decides who trains what, of the rows that the actor trains on."""
        bus = RunPaths(self._config.run_dir).bus
        index = self._reader.index(batch)
        self._note_shards(batch, index.guid, bus.root.parent)
        columns, chosen = values_of(
            index,
            self._config.algorithm,
            self._config.rollout.samples_per_prompt,
            longest=self._config.rollout.max_new_tokens,
            masks_errors=self._config.reward.masks_errors,
        )
        rewards = columns["advantages"].astype(np.float32)  # before rows are read they are that
        dealt = plan_micro_batches(
            lengths_of(index)[chosen].tolist(),
            num_ranks=self._megatron.layout.data_parallel,
            budget=self._megatron.tokens_per_micro_batch,
            count_multiple_of=self._megatron.layout.micro_batches_multiple_of,
            shards=shards_of(batch.parts)[chosen].tolist(),
        )
        micro_batches = [[chosen[rows].tolist() for rows in rank] for rank in dealt]
        return Lesson(batch.step, batch.parts, batch.sidecars, rewards, micro_batches)

    def _note_shards(self, batch: PlannedBatch, guids: Any, root: Any) -> None:  # noqa: ANN401
        bus, at = RunPaths(root).bus, 0
        self._shards = {}
        for part in batch.parts:
            name = bus.shard(part.producer, part.fence, part.seq).relative_to(root)
            self._shards[int(guids[at])] = str(name)
            at += part.hi - part.lo


def _explained(fields: dict[str, Any]) -> dict[str, Any]:
    """The metrics with the share of the returns' variance that the values explain."""
    error, squares = fields.pop("value/error", 0.0), fields.pop("value/square_error", 0.0)
    mean, square = fields.get("value/return", 0.0), fields.pop("value/square_return", 0.0)
    variance = square - mean**2
    explained = 1 - (squares - error**2) / variance if variance > 1e-12 else 0.0
    return {**fields, "value/return": mean, "value/explained": explained}
