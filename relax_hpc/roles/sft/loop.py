"""The actor of a supervised fine-tuning: documents in, a model out; there are no engines."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.losses import LossOutput, cross_entropy
from relax_hpc.comm.world import World
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.roles.actor.loop import StepLog, Tokens, Trainer, end_step, stop_or_go_on
from relax_hpc.roles.dealing.micro_batches import MicroBatches
from relax_hpc.schema import Array, Trajectory
from relax_hpc.telemetry.timers import Timers


class Share(NamedTuple):
    """What one data-parallel rank trains of a batch."""

    rows: list[Trajectory]
    micro_batches: MicroBatches
    """Indices into `rows`."""


class HeldoutLoss(NamedTuple):
    """Mean negative log-likelihood of the held-out documents' trained tokens, nats."""

    loss: float
    num_tokens: int


class SftTrainer(Trainer, Protocol):
    def forward_logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> Sequence[Array]:
        """Per trajectory [tokens] logprobs under the current weights."""
        ...


class Lead(StepLog, Protocol):
    """What only rank 0 does: read documents, keep the record, write the model."""

    def next_batch(self) -> list[Share]:
        """Per data-parallel rank."""
        ...

    def heldout(self) -> list[Share]: ...
    def measured(self, step: int, heldout: HeldoutLoss) -> None: ...
    def export(self, tensors: Iterator[tuple[str, Tensor]]) -> None: ...


def run(
    config: SftRunConfig,
    world: World,
    trainer: SftTrainer,
    lead: Lead | None,
    save: Callable[[], None],
) -> None:
    """Trains until `num_steps`, and exports the model; rank 0 reads, and deals out.

    Args:
        save: called after every step; saves when it is time to.
    """
    heldout: Share = world.bcast(lead.heldout() if lead else None)[trainer.dp_rank]
    if trainer.step == 0:
        _measure(world, trainer, heldout, lead)
    while trainer.step < config.num_steps:
        step, timers = trainer.step + 1, Timers()
        last = step == config.num_steps
        with timers("read"):
            share: Share = world.bcast(lead.next_batch() if lead else None)[trainer.dp_rank]
        unused = np.zeros(len(share.rows))
        with timers.phase("train"):
            trainer.accumulate(share.rows, share.micro_batches, unused, loss, last=True)
            stats = trainer.update()
        stop_or_go_on(lead, trainer, step, config.actor)
        if last or _is_due(step, config.sft.heldout_every):
            with timers("heldout"):
                _measure(world, trainer, heldout, lead)
        with timers("save"):
            save()
        if lead:
            end_step(lead, trainer, step, stats, timers)
    _export(trainer, lead)


def loss(logprobs: Tensor, tokens: Tokens) -> LossOutput:
    """Of one micro-batch."""
    return cross_entropy(logprobs, tokens.loss_mask)


def heldout_loss(world: World, trainer: SftTrainer, share: Share) -> HeldoutLoss:
    """Of the documents in all ranks' shares; the same on every rank."""
    found = trainer.forward_logprobs(share.rows, share.micro_batches)
    mine = {}
    for row, logprobs in zip(share.rows, found, strict=True):
        mask = row.loss_mask[1:] != 0
        mine[row.guid] = (-float(logprobs[1:][mask].sum(dtype=np.float64)), int(mask.sum()))
    # Ranks of a replica hold the same documents: by name, each counts once.
    every = {guid: part for rank in world.allgather(mine) for guid, part in rank.items()}
    num_tokens = sum(count for _, count in every.values())
    return HeldoutLoss(math.fsum(nll for nll, _ in every.values()) / num_tokens, num_tokens)


def _measure(world: World, trainer: SftTrainer, share: Share, lead: Lead | None) -> None:
    if not share.rows and not share.micro_batches:
        return  # on no rank: there are no held-out documents
    measured = heldout_loss(world, trainer, share)
    if lead:
        lead.measured(trainer.step, measured)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _export(trainer: SftTrainer, lead: Lead | None) -> None:
    tensors = trainer.named_weights()
    if lead:
        lead.export(tensors)
    else:
        for _ in tensors:  # gathering needs every rank; only rank 0 keeps what comes out
            pass
