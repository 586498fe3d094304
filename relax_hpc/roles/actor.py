"""The actor role: trains on batches in their order and publishes every new policy."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.algorithms.advantages import group_relative
from relax_hpc.algorithms.losses import LossOutput, grpo
from relax_hpc.bus.plan import PlanRecord
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.comm.world import World
from relax_hpc.config import AlgorithmConfig, RunConfig
from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.publish import Published

log = logging.getLogger(__name__)


Floats = npt.NDArray[np.floating]


class Tokens(Protocol):
    """Packed tokens of one micro-batch, as the trainer hands them to the loss; [T] each."""

    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def rollout_logprobs(self) -> Tensor: ...
    @property
    def old_logprobs(self) -> Tensor | None: ...
    @property
    def advantages(self) -> Tensor: ...


Loss = Callable[[Tensor, Tokens], LossOutput]


class Trainer(Protocol):
    """What this role needs of a training engine; collective over its ranks."""

    step: int

    def split(self, lengths: Sequence[int]) -> list[int]:
        """Which of the rows, given their tokens, this data-parallel rank trains on."""
        ...

    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    def train_step(
        self, trajectories: Sequence[Trajectory], advantages: Floats, *, num_tokens: int, loss: Loss
    ) -> dict[str, float]: ...
    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...


class Lead(Protocol):
    """What only rank 0 does: decide batches, serve engines, keep the record."""

    def next_batch(self, step: int) -> PlanRecord: ...
    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> Published: ...
    def end_step(self, step: int, fields: dict[str, Any]) -> None:
        """Compares weights if it is time to, and logs."""
        ...

    def finish(self) -> None: ...


def run(
    config: RunConfig,
    world: World,
    trainer: Trainer,
    reader: Reader,
    lead: Lead | None,
    save: Callable[[], None],
) -> None:
    """Trains until `num_steps`.

    The order is the protocol: publish, save, and only then release, which `save` does. A shard is
    forgotten when no resume can need it, so a restarted actor finds its next batches on the bus.
    """
    _publish(trainer, lead)
    while trainer.step < config.algorithm.num_steps:
        step, timers = trainer.step + 1, Timers()
        with timers("wait"):
            record = world.bcast(lead.next_batch(step) if lead else None)
            index = reader.index(record)
        with timers("read"):
            advantages, rows = my_share(config, index, trainer)
            trajectories = reader.rows(record, rows)
            num_tokens = _global_tokens(world, trainer, trajectories)
        with timers("train"):
            loss = loss_of(config.algorithm, num_tokens)
            stats = trainer.train_step(
                trajectories, advantages[rows], num_tokens=num_tokens, loss=loss
            )
        with timers("publish"):
            _publish(trainer, lead)
        if step % config.actor.save_every == 0 or step == config.algorithm.num_steps:
            with timers("save"):
                save()
        if lead:
            lead.end_step(step, describe(config, index, step) | stats | timers.seconds)
    if lead:
        lead.finish()


def my_share(config: RunConfig, index: BatchIndex, trainer: Trainer) -> tuple[Floats, list[int]]:
    """The advantages of all rows, and the rows that this data-parallel rank trains on.

    A row without advantage (its whole group scored the same) has no gradient: it is left out, and
    its tokens do not count in the loss's mean, as in DAPO (arXiv:2503.14476), dynamic sampling.
    """
    advantages = group_advantages(index, config.algorithm, config.rollout.samples_per_prompt)
    teaching = np.flatnonzero(advantages)
    mine = trainer.split(lengths_of(index)[teaching].tolist())
    return advantages, teaching[mine].tolist()


def group_advantages(index: BatchIndex, algorithm: AlgorithmConfig, siblings: int) -> Floats:
    """[rows] advantages of a batch, in plan order: groups are whole and contiguous there."""
    rewards = torch.from_numpy(index.rewards).view(-1, siblings)  # [P, G]
    return group_relative(rewards, normalize_std=algorithm.normalize_std).view(-1).numpy()


def lengths_of(index: BatchIndex) -> npt.NDArray[np.int64]:
    """[rows] tokens, prompt and response."""
    return index.prompt_len.astype(np.int64) + index.response_len.astype(np.int64)


def loss_of(algorithm: AlgorithmConfig, num_tokens: int) -> Loss:
    """The policy loss of this run, for a batch of `num_tokens` trained tokens."""

    def loss(logprobs: Tensor, tokens: Tokens) -> LossOutput:
        assert tokens.old_logprobs is not None
        return grpo(
            logprobs,
            tokens.old_logprobs,
            tokens.rollout_logprobs,
            tokens.advantages,
            tokens.loss_mask,
            num_tokens=num_tokens,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
        )

    return loss


def describe(config: RunConfig, index: BatchIndex, step: int) -> dict[str, float]:
    """What a batch was like, before anything is done with it."""
    rewards = index.rewards.reshape(-1, config.rollout.samples_per_prompt)
    lag = step - 1 - index.policy_version_min.astype(np.int64)
    return {
        "policy_version": step,
        "reward/mean": float(index.rewards.mean()),
        "staleness/mean": float(lag.mean()),
        "staleness/max": int(lag.max()),
        "num_trajectories": len(lag),
        "num_tokens": int(lengths_of(index).sum()),
        "response/mean": float(index.response_len.mean()),
        "groups/solved": float((rewards == 1).all(axis=1).mean()),
        "groups/teaching": float((rewards != rewards[:, :1]).any(axis=1).mean()),
    }


def _publish(trainer: Trainer, lead: Lead | None) -> None:
    tensors = trainer.named_weights()
    if lead:
        lead.publish(trainer.step, tensors)
    else:
        for _ in tensors:  # gathering needs every rank; only rank 0 keeps what comes out
            pass


def _global_tokens(world: World, trainer: Trainer, trajectories: list[Trajectory]) -> int:
    """Trained tokens of the batch, 1 if there are none; ranks of one replica hold the same rows."""
    own = int(sum(np.count_nonzero(row.loss_mask) for row in trajectories))
    return max(1, sum(dict(world.allgather((trainer.dp_rank, own))).values()))
