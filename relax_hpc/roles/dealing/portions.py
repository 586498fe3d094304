"""The decisions of rank 0 about a batch as its portions come in, which it tells the other ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.part import Rows
from relax_hpc.bus.plan import Part, PlanRecord
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.dealing.micro_batches import (
    MicroBatches,
    imbalance,
    own_rows,
    plan_micro_batches,
)
from relax_hpc.schema import FinishReason

Floats = npt.NDArray[np.floating]
Lengths = npt.NDArray[np.int64]


class Portion(NamedTuple):
    """Some prompt groups of a batch, and who trains what of them; rows count in its order."""

    record: PlanRecord
    columns: dict[str, Floats]
    """[rows] each: what is known of them before they are read, as columns that they will have."""
    micro_batches: list[MicroBatches]
    """Micro-batches per data-parallel rank."""
    mini_batches: list[int]
    """Micro-batches of each of a batch's updates, on every rank; empty if it has one."""


class Share(NamedTuple):
    """One data-parallel rank's part of a portion."""

    rows: list[int]
    """Rows of the portion, rising."""
    columns: dict[str, Floats]
    """[len(rows)] each."""
    micro_batches: MicroBatches
    """Indices into `rows`."""
    mini_batches: list[int]
    """Micro-batches of each update, see `Portion`."""


class Standing(NamedTuple):
    """The worth of P prompt groups of G episodes, before any row is read."""

    worth: Floats
    """[P, G] advantages."""
    teaches: npt.NDArray[np.bool_]
    """[P, G] episodes that are trained on."""
    spread: npt.NDArray[np.bool_]
    """[P] groups whose rewards differ, before a penalty for length, and that train something."""
    truncated: npt.NDArray[np.bool_]
    """[P] groups of which nothing is left because responses were cut off."""


class Batch:
    """A batch on rank 0: deals its portions out, and remembers what it was like."""

    def __init__(self, config: RunConfig, reader: Reader) -> None:
        self._config, self._reader = config, reader
        self._siblings = config.rollout.samples_per_prompt
        self._masks_errors = config.reward.masks_errors
        self._indices: list[BatchIndex] = []
        self._parts: list[Mapping[str, npt.NDArray[Any]]] = []
        """Parts of the rewards of each of them."""
        self._load = [0] * config.actor.layout.data_parallel
        self._num_micro_batches = 0

    def deal(self, record: PlanRecord) -> Portion:
        """Decides who trains what of a portion; nobody else reads its row columns.

        A row that teaches nothing is left out, and does not count in the loss's mean.

        Raises:
            ConfigError: a row is longer than actor.tokens_per_micro_batch.
            BusError: a shard is missing or damaged.
        """
        index = self._reader.index(record)
        columns, teaching = values_of(
            index,
            self._config.algorithm,
            self._siblings,
            longest=self._config.rollout.max_new_tokens,
            masks_errors=self._masks_errors,
        )
        groups = (np.cumsum(index.segment == 0) - 1) // self._siblings
        lengths, shards = lengths_of(index), shards_of(record.parts)
        parts = split_groups(groups[teaching], self._config.algorithm.mini_batches)
        dealt = [self._deal(lengths, shards, teaching[part]) for part in parts]
        self._indices.append(index)
        self._parts.append(self._reader.parts(record))
        return Portion(
            record,
            columns,
            [[rows for part in dealt for rows in part[rank]] for rank in range(len(self._load))],
            [len(part[0]) for part in dealt] if len(dealt) > 1 else [],
        )

    def _deal(
        self, lengths: Lengths, shards: Lengths, rows: npt.NDArray[np.int64]
    ) -> list[MicroBatches]:
        """Deals out `rows`, which one update needs; those of earlier portions count with them."""
        is_part = self._config.algorithm.mini_batches > 1  # every update waits for its slowest rank
        dealt = plan_micro_batches(
            lengths[rows].tolist(),
            num_ranks=self._config.actor.layout.data_parallel,
            budget=self._config.actor.tokens_per_micro_batch,
            count_multiple_of=self._config.actor.layout.micro_batches_multiple_of,
            load=None if is_part else self._load,
            shards=shards[rows].tolist(),
        )
        self._num_micro_batches += len(dealt[0])
        found = [[rows[batch].tolist() for batch in rank] for rank in dealt]
        for rank, batches in enumerate(found):
            self._load[rank] += sum(int(lengths[batch].sum()) for batch in batches)
        return found

    def describe(self, step: int) -> dict[str, float]:
        """Describes the batch, before anything was done with it; means are over episodes."""
        index = BatchIndex(*map(np.concatenate, zip(*self._indices, strict=True)))
        first = np.flatnonzero(index.segment == 0)
        rewards = rewards_of(index, self._siblings, masks_errors=self._masks_errors)
        counts = ~np.isnan(rewards)
        # A group without any reward is not solved, and teaches nothing.
        solved = np.fmin.reduce(rewards, axis=1) >= np.float32(self._config.reward.solved_at)
        standing = self._standing(index)
        oldest = np.minimum.reduceat(index.policy_version_min.astype(np.int64), first)
        lag = step - 1 - oldest
        mixed = index.policy_version_min != index.policy_version_max
        found = self._means_of_parts(first)
        if counts.any():  # where all have failed there is no mean
            found["reward/mean"] = float(rewards[counts].mean())
        if self._config.replays_routing:
            found["routing/mixed"] = float(mixed.mean())
        return found | {
            "policy_version": step,
            "reward/errors": float((index.reward_error[first] != 0).mean()),
            "staleness/mean": float(lag.mean()),
            "staleness/max": int(lag.max()),
            "num_trajectories": len(index.guid),
            "num_tokens": int(lengths_of(index).sum()),
            "response/mean": float(index.response_len.sum() / len(first)),
            "response/truncated": float(
                np.maximum.reduceat(index.finish == FinishReason.LENGTH, first).mean()
            ),
            "groups/solved": float(solved.mean()),
            "groups/teaching": float(standing.spread.mean()),
            "batch/portions": len(self._indices),
            "batch/micro_batches": self._num_micro_batches,
            "batch/imbalance": imbalance(self._load),
        }

    def _means_of_parts(self, first: Lengths) -> dict[str, float]:
        """Means over the episodes that have a part; `first` are the first rows of all."""
        sizes = [len(index.guid) for index in self._indices]
        means = {}
        for name in dict.fromkeys(name for parts in self._parts for name in parts):
            values = np.concatenate(
                [
                    parts.get(name, np.full(size, np.nan, np.float32))
                    for parts, size in zip(self._parts, sizes, strict=True)
                ]
            )[first]
            if not np.isnan(values).all():
                means[f"parts/{name}"] = float(np.nanmean(values))
        return means

    def _standing(self, index: BatchIndex) -> Standing:
        return standing_of(
            index,
            self._config.algorithm,
            self._siblings,
            longest=self._config.rollout.max_new_tokens,
            masks_errors=self._masks_errors,
        )


def share_of(portion: Portion, dp_rank: int) -> Share:
    """Returns the part of data-parallel rank `dp_rank`, numbered among the rows that it reads."""
    rows, micro_batches = own_rows(portion.micro_batches[dp_rank])
    columns = {name: values[rows] for name, values in portion.columns.items()}
    return Share(rows, columns, micro_batches, portion.mini_batches)


def split_groups(groups: npt.NDArray[np.int64], count: int) -> list[npt.NDArray[np.int64]]:
    """Splits rows into mini-batches of whole prompt groups, in order, as equal as can be.

    Args:
        groups: [rows] prompt group of each, rising.
        count: mini-batches; there are fewer if there are fewer groups, and one if there is no row.

    Returns:
        Row numbers of each.
    """
    if count == 1 or not len(groups):
        return [np.arange(len(groups))]
    present = np.array_split(np.unique(groups), count)
    return [np.flatnonzero(np.isin(groups, part)) for part in present if len(part)]


def values_of(
    index: BatchIndex,
    algorithm: Algorithm,
    siblings: int,
    *,
    longest: int,
    masks_errors: bool = False,
) -> tuple[dict[str, Floats], npt.NDArray[np.int64]]:
    """Asks the algorithm about the rows of a portion, before any is read.

    Every row of an episode has the advantage of the episode.

    Args:
        index: whole and contiguous groups.
        algorithm: of the run.
        siblings: of a group.
        longest: tokens that a response may have.
        masks_errors: episodes whose reward failed are compared with nobody, and teach nothing.

    Returns:
        `advantages`, and unless tokens count the same `weights` and `counts`, [rows] in plan order;
        and the numbers of those that teach, rising.

    Raises:
        ConfigError: the algorithm cannot tell an advantage where a sibling has no reward.
    """
    standing = standing_of(index, algorithm, siblings, longest=longest, masks_errors=masks_errors)
    episode = np.cumsum(index.segment == 0) - 1
    lengths = index.response_len.astype(np.int64)
    teaching = np.flatnonzero(standing.teaches.reshape(-1)[episode])
    columns: dict[str, Floats] = {"advantages": standing.worth.reshape(-1)[episode]}
    groups = episode // siblings
    weighed = row_weights(algorithm.aggregation, lengths[teaching], groups[teaching], longest)
    if weighed is not None:
        for name, values in weighed._asdict().items():
            columns[name] = np.zeros(len(lengths))
            columns[name][teaching] = values
    return columns, teaching


def standing_of(
    index: BatchIndex,
    algorithm: Algorithm,
    siblings: int,
    *,
    longest: int,
    masks_errors: bool = False,
) -> Standing:
    """Compares siblings; see `values_of`."""
    rewards = rewards_of(index, siblings, masks_errors=masks_errors)
    counts = ~np.isnan(rewards)
    episode = np.cumsum(index.segment == 0) - 1
    lengths = np.bincount(episode, index.response_len).astype(np.int64).reshape(rewards.shape)
    cut = np.bincount(episode, index.finish == FinishReason.LENGTH).reshape(rewards.shape) > 0
    compared = algorithm.groups.compared(rewards, lengths, longest).astype(np.float32)
    found = algorithm.advantage.of_groups(Rows(compared, lengths * counts))
    worth = np.where(counts, found, 0)
    if not counts.all() and not np.isfinite(worth).all():
        raise _unequal_to_errors(algorithm)
    trained = counts & algorithm.groups.trained(cut)
    spread = np.not_equal(worth, 0).any(axis=1, keepdims=True)
    teaches = trained & (algorithm.teaches_without_advantage | spread)
    differ = np.fmin.reduce(rewards, axis=1) < np.fmax.reduce(rewards, axis=1)
    is_left = trained.any(axis=1)
    truncated = np.logical_and(counts.any(axis=1), ~is_left)
    return Standing(worth, teaches, np.logical_and(differ, is_left), truncated)


def rewards_of(index: BatchIndex, siblings: int, *, masks_errors: bool) -> npt.NDArray[np.float32]:
    """[P, G] of episodes; with `masks_errors`, NaN where it failed."""
    begins = index.segment == 0
    rewards: npt.NDArray[np.float32] = index.rewards[begins].astype(np.float32)
    if masks_errors:
        rewards[index.reward_error[begins] != 0] = np.nan
    return rewards.reshape(-1, siblings)


def check_errors(algorithm: Algorithm) -> None:
    """Checks that an algorithm can do without the reward of a sibling.

    Raises:
        ConfigError: it cannot.
    """
    rewards = np.array([[1, 0, np.nan, 1], [np.nan] * 4], np.float32)
    worth = algorithm.advantage.of_groups(Rows(rewards, np.ones((2, 4), np.int64)))
    if not np.isfinite(worth[~np.isnan(rewards)]).all():
        raise _unequal_to_errors(algorithm)


def _unequal_to_errors(algorithm: Algorithm) -> ConfigError:
    return ConfigError(
        f"algorithm.advantage.name = {algorithm.advantage.name!r}: gives siblings of a response "
        'without a reward (NaN) no advantage; set reward.on_error to "zero", or let it leave such '
        "responses out"
    )


def lengths_of(index: BatchIndex) -> npt.NDArray[np.int64]:
    """[rows] tokens, prompt and response."""
    return index.prompt_len.astype(np.int64) + index.response_len.astype(np.int64)


def shards_of(parts: Sequence[Part]) -> npt.NDArray[np.int64]:
    """[rows] number of the shard that each row is in."""
    numbers: dict[str, int] = {}
    of_part = [numbers.setdefault(part.uuid, len(numbers)) for part in parts]
    return np.repeat(of_part, [part.hi - part.lo for part in parts]).astype(np.int64)
