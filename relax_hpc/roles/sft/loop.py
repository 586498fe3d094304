"""Runs the actor of supervised fine-tuning: documents in, a model out, without engines."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.composition import Objective, cross_entropy
from relax_hpc.config.run import SftRunConfig
from relax_hpc.roles.dealing.micro_batches import MicroBatches
from relax_hpc.roles.training.duties import Duties, stop_or_go_on
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import Row
from relax_hpc.trainer.training_engine import ScoringEngine, TrainingEngine


class RankBatch(NamedTuple):
    rows: Sequence[Row]
    micro_batches: MicroBatches


class HeldoutLoss(NamedTuple):
    """Mean negative log-likelihood of the held-out documents' trained tokens, nats."""

    loss: float
    num_tokens: int


class SftDuties(Duties[list[RankBatch]]):
    """A rank's work besides training; a task is the share of every data-parallel rank."""

    def heldout(self) -> list[RankBatch] | None:
        """Returns the held-out share of every data-parallel rank, as rank 0 decides."""
        return None

    def note_heldout(self, step: int, heldout: HeldoutLoss) -> None: ...

    def export(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Iterates to the end: gathering needs every rank."""
        for _ in tensors:
            pass


def run(
    config: SftRunConfig,
    world: World,
    trainer: TrainingEngine,
    duties: SftDuties,
    save: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Trains until `num_steps`, and exports the model; rank 0 reads and deals out.

    Args:
        save: called after every step; saves if a save is due.
        stop: called before every step; saves and waits if the job is about to end.
    """
    objective = Objective(cross_entropy, reads_old=False)
    heldout: RankBatch = world.bcast(duties.heldout())[trainer.dp_rank]
    if trainer.step == 0:
        _measure(world, trainer, heldout, duties)
    while trainer.step < config.num_steps:
        stop()
        step = trainer.step + 1
        timers = Timers(step)
        last = step == config.num_steps
        with timers("read"):
            share: RankBatch = world.bcast(duties.next_task(step, timers))[trainer.dp_rank]
        with timers.phase("train"):
            trainer.accumulate(share.rows, share.micro_batches, objective, last=True)
            stats = trainer.update()
        stop_or_go_on(duties, step, trainer.skip)
        if last or _is_due(step, config.sft.heldout_every):
            with timers("heldout"):
                _measure(world, trainer, heldout, duties)
        with timers("save"):
            save()
        duties.end_step(step, stats | trainer.costs, timers)
    duties.export(trainer.stream_weights())


def heldout_loss(world: World, trainer: ScoringEngine, share: RankBatch) -> HeldoutLoss:
    """Measures the loss of the documents in all ranks' shares; the same on every rank."""
    found = trainer.forward_logprobs(share.rows, share.micro_batches)
    mine = {}
    for row, logprobs in zip(share.rows, found, strict=True):
        mask = row.loss_mask[1:] != 0
        mine[row.guid] = (-float(logprobs[1:][mask].sum(dtype=np.float64)), int(mask.sum()))
    # Ranks of a replica hold the same documents: by name, each counts once.
    every = {guid: part for rank in world.allgather(mine) for guid, part in rank.items()}
    num_tokens = sum(count for _, count in every.values())
    return HeldoutLoss(math.fsum(nll for nll, _ in every.values()) / num_tokens, num_tokens)


def _measure(world: World, trainer: TrainingEngine, share: RankBatch, duties: SftDuties) -> None:
    if not share.rows and not share.micro_batches:
        return  # on no rank: there are no held-out documents
    duties.note_heldout(trainer.step, heldout_loss(world, trainer, share))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
