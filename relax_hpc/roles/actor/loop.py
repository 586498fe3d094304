"""The actor role: trains on batches in their order, each portion as soon as it is there."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from relax_hpc.algorithms.losses import LossOutput, grpo, with_kl
from relax_hpc.bus.plan import PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.comm.world import World
from relax_hpc.config.actor import ActorConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.actor.lease import Lease, OwnGpus
from relax_hpc.roles.actor.reference import HybridReference
from relax_hpc.roles.dealing.portions import Batch, Floats, Portion, Share, share_of
from relax_hpc.roles.training.skips import Skip, stop_if_stuck
from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.timers import Phase, Timers
from relax_hpc.weights.publish import Published

log = logging.getLogger(__name__)


class Tokens(Protocol):
    """Packed tokens of one micro-batch, as the trainer hands them to the loss; [T] each."""

    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def rollout_logprobs(self) -> Tensor: ...
    @property
    def old_logprobs(self) -> Tensor | None: ...
    @property
    def ref_logprobs(self) -> Tensor | None: ...
    @property
    def advantages(self) -> Tensor: ...


Loss = Callable[[Tensor, Tokens], LossOutput]


class Trainer(Protocol):
    """What this role needs of a training engine; collective over its ranks."""

    step: int

    @property
    def dp_rank(self) -> int: ...
    @property
    def costs(self) -> Mapping[str, float]:
        """Time, memory and use of the hardware of the last step's training."""
        ...

    @property
    def skip(self) -> Skip | None:
        """Why the last update was not done."""
        ...

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        micro_batches: Sequence[Sequence[int]],
        advantages: Floats,
        loss: Loss,
        *,
        last: bool,
    ) -> None:
        """Adds the gradient of a part of the batch; `micro_batches` index `trajectories`.

        Args:
            last: nothing follows.
        """
        ...

    def update(self) -> dict[str, float]:
        """Turns policy `step` into `step` + 1 by what was accumulated."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def lend(self) -> None:
        """Gives up memory that it needs only while it trains."""
        ...

    def reclaim(self) -> None: ...


class StepLog(Protocol):
    """How rank 0 keeps the record of steps."""

    def end_step(self, step: int, fields: dict[str, Any], phases: Sequence[Phase]) -> None:
        """Logs the step, and its phases as they happened."""
        ...

    def skipped(self, step: int, skip: Skip) -> None:
        """Notes an update that was not done."""
        ...


class Lead(StepLog, Protocol):
    """What only rank 0 does: decide batches, serve engines, keep the record."""

    def next_portion(self, step: int) -> PlanRecord | None:
        """None if engines have to be given the current weights first."""
        ...

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> Published: ...
    def finish(self) -> None: ...


class Helper(Protocol):
    """What the other ranks do in a publication."""

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> None: ...


def run(
    config: RunConfig,
    world: World,
    trainer: Trainer,
    reader: Reader,
    lead: Lead | None,
    save: Callable[[], None],
    reference: HybridReference | None = None,
    helper: Helper | None = None,
    lease: Lease | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Trains until `num_steps`.

    Rank 0 decides who trains what; of each data-parallel replica one rank reads it, the others are
    told. The order is the protocol: publish, save, and only then release, which `save` does once a
    checkpoint is complete. A shard is forgotten when no resume can need it, so a restarted actor
    finds its next batches.

    Args:
        save: called after every step; saves when it is time to.
        helper: of ranks without a lead.
        lease: on the GPUs.
        check: called when the gradient of a batch is there, and not applied yet.
    """
    lease = lease or OwnGpus()
    replica, loss = world.split(trainer.dp_rank), loss_of(config)
    lease.to_engines(trainer)
    _publish(world, trainer, lead, helper)
    while trainer.step < config.algorithm.num_steps:
        step, timers, batch, last = trainer.step + 1, Timers(), Batch(config, reader), False
        while not last:
            portion = _next_portion(world, lead, batch, step, timers)
            if portion is None:
                with timers("publish"):
                    _publish(world, trainer, lead, helper)
                continue
            with timers("read"):
                share, last = share_of(portion, trainer.dp_rank), portion.record.last
                trajectories = _read(config, replica, reader, portion, share)
            with timers("lease"):
                lease.to_trainer(trainer)
            if reference:
                with timers("reference"):
                    trajectories = reference.fill(trajectories, share.micro_batches)
            with timers.phase("train"):
                trainer.accumulate(
                    trajectories, share.micro_batches, share.advantages, loss, last=last
                )
        if check:
            check()
        with timers.phase("train"):
            stats = trainer.update()
        stop_or_go_on(lead, trainer, step, config.actor)
        lease.to_engines(trainer)
        with timers("publish"):
            _publish(world, trainer, lead, helper)
        if reference:
            reference.end_step(step)
        with timers("save"):
            save()
        if lead:
            end_step(lead, trainer, step, batch.describe(step) | stats, timers)
    if lead:
        lead.finish()


def loss_of(config: RunConfig) -> Loss:
    """The policy loss of this run, with a KL term if there is a reference."""
    algorithm = config.algorithm

    def loss(logprobs: Tensor, tokens: Tokens) -> LossOutput:
        assert tokens.old_logprobs is not None
        output = grpo(
            logprobs,
            tokens.old_logprobs,
            tokens.rollout_logprobs,
            tokens.advantages,
            tokens.loss_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
        )
        if config.reference.placement == "none":
            return output
        assert tokens.ref_logprobs is not None
        return with_kl(
            output,
            logprobs,
            tokens.ref_logprobs,
            tokens.loss_mask,
            coefficient=algorithm.kl_coefficient,
        )

    return loss


def _next_portion(
    world: World, lead: Lead | None, batch: Batch, step: int, timers: Timers
) -> Portion | None:
    """On all ranks; None if engines have to be given the current weights first."""
    with timers("wait"):
        record = lead.next_portion(step) if lead else None
    with timers("read"):
        portion: Portion | None = world.bcast(batch.deal(record) if record else None)
    return portion


def _read(
    config: RunConfig, replica: World, reader: Reader, portion: Portion, share: Share
) -> list[Trajectory]:
    """The rows of `share`, on all ranks of a replica, which one of them reads."""
    rows = reader.rows(portion.record, share.rows) if replica.rank == 0 else []
    if config.algorithm.over_age == "mask":
        step, limit = portion.record.step, config.algorithm.max_staleness
        rows = [mask_over_age(row, step=step, max_staleness=limit) for row in rows]
    return list(replica.bcast(rows))


def stop_or_go_on(lead: StepLog | None, trainer: Trainer, step: int, actor: ActorConfig) -> None:
    """Says why the update was not done, if it was not; called before anything is made of it.

    Raises:
        TrainingError: it is not worth while to go on.
    """
    if lead and trainer.skip:
        lead.skipped(step, trainer.skip)
    stop_if_stuck(trainer.skip, actor)


def end_step(
    lead: StepLog, trainer: Trainer, step: int, fields: dict[str, Any], timers: Timers
) -> None:
    """Logs a step with what it cost."""
    lead.end_step(step, {**fields, **trainer.costs, **timers.seconds}, timers.phases)


def _publish(world: World, trainer: Trainer, lead: Lead | None, helper: Helper | None) -> None:
    """Gives the engines the current policy. Bringing tensors together needs every rank."""
    again = True
    while again:
        tensors = trainer.named_weights()
        if lead:
            again = lead.publish(trainer.step, tensors).again
        elif helper:
            helper.publish(trainer.step, tensors)
        else:
            for _ in tensors:  # only rank 0 keeps what comes out
                pass
        again = world.bcast(again)
