"""What rank 0 decides about a batch as its portions come in, and tells the other ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from relax_hpc.algorithms.advantages import group_relative
from relax_hpc.bus.plan import Part, PlanRecord
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.config.run import AlgorithmConfig, RunConfig
from relax_hpc.roles.dealing.micro_batches import (
    MicroBatches,
    imbalance,
    own_rows,
    plan_micro_batches,
)

Floats = npt.NDArray[np.floating]


class Portion(NamedTuple):
    """Some prompt groups of a batch, and who trains what of them; rows count in its order."""

    record: PlanRecord
    advantages: Floats
    """[rows]"""
    micro_batches: list[MicroBatches]
    """Per data-parallel rank."""


class Share(NamedTuple):
    """What one data-parallel rank trains of a portion."""

    rows: list[int]
    """Of the portion, rising."""
    advantages: Floats
    """[len(rows)]"""
    micro_batches: MicroBatches
    """Indices into `rows`."""


class Batch:
    """A batch on rank 0: deals its portions out, and remembers what it was like."""

    def __init__(self, config: RunConfig, reader: Reader) -> None:
        self._config, self._reader = config, reader
        self._indices: list[BatchIndex] = []
        self._load = [0] * config.actor.data_parallel
        self._num_micro_batches = 0

    def deal(self, record: PlanRecord) -> Portion:
        """Decides who trains what of a portion; nobody else reads its row columns.

        A row without advantage (its whole group scored the same) has no gradient, unless there is a
        KL term: it is left out, and its tokens do not count in the loss's mean, as in DAPO
        (arXiv:2503.14476), dynamic sampling.

        Raises:
            ConfigError: a row is longer than actor.tokens_per_micro_batch.
            BusError: a shard is missing or damaged.
        """
        index = self._reader.index(record)
        advantages = group_advantages(
            index, self._config.algorithm, self._config.rollout.samples_per_prompt
        )
        pulled = self._config.algorithm.kl_coefficient > 0  # to the reference, all rows are
        teaching = np.arange(len(advantages)) if pulled else np.flatnonzero(advantages)
        lengths = lengths_of(index)[teaching].tolist()
        dealt = plan_micro_batches(
            lengths,
            num_ranks=self._config.actor.data_parallel,
            budget=self._config.actor.tokens_per_micro_batch,
            count_multiple_of=self._config.actor.micro_batches_multiple_of,
            load=self._load,
            shards=shards_of(record.parts)[teaching].tolist(),
        )
        self._indices.append(index)
        self._num_micro_batches += len(dealt[0])
        for rank, batches in enumerate(dealt):
            self._load[rank] += sum(lengths[row] for rows in batches for row in rows)
        micro_batches = [[teaching[rows].tolist() for rows in rank] for rank in dealt]
        return Portion(record, advantages, micro_batches)

    def describe(self, step: int) -> dict[str, float]:
        """What the batch was like, before anything was done with it."""
        index = BatchIndex(*map(np.concatenate, zip(*self._indices, strict=True)))
        rewards = index.rewards.reshape(-1, self._config.rollout.samples_per_prompt)
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
            "batch/portions": len(self._indices),
            "batch/micro_batches": self._num_micro_batches,
            "batch/imbalance": imbalance(self._load),
        }


def share_of(portion: Portion, dp_rank: int) -> Share:
    """What data-parallel rank `dp_rank` trains, numbered among the rows that it reads."""
    rows, micro_batches = own_rows(portion.micro_batches[dp_rank])
    return Share(rows, portion.advantages[rows], micro_batches)


def group_advantages(index: BatchIndex, algorithm: AlgorithmConfig, siblings: int) -> Floats:
    """[rows] advantages of a portion, in plan order: groups are whole and contiguous there."""
    rewards = torch.from_numpy(index.rewards).view(-1, siblings)  # [P, G]
    return group_relative(rewards, normalize_std=algorithm.normalize_std).view(-1).numpy()


def lengths_of(index: BatchIndex) -> npt.NDArray[np.int64]:
    """[rows] tokens, prompt and response."""
    return index.prompt_len.astype(np.int64) + index.response_len.astype(np.int64)


def shards_of(parts: Sequence[Part]) -> npt.NDArray[np.int64]:
    """[rows] number of the shard that each row is in."""
    numbers: dict[str, int] = {}
    of_part = [numbers.setdefault(part.uuid, len(numbers)) for part in parts]
    return np.repeat(of_part, [part.hi - part.lo for part in parts]).astype(np.int64)
