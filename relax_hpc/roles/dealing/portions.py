"""Decides on rank 0 which groups of a portion teach, and which rank trains them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.groups import MOST_BATCHES, Refill
from relax_hpc.algorithms.part import Rows
from relax_hpc.bus.plan import PlanRecord, ShardRange, SkippedGroup
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.bus.skips import GroupVerdict, Judge
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.dealing.micro_batches import (
    MicroBatches,
    deal_rows,
    imbalance,
    own_rows,
)
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import FinishReason

Floats = npt.NDArray[np.floating]
Lengths = npt.NDArray[np.int64]


class Portion(NamedTuple):
    """Some prompt groups of a batch, dealt to ranks; rows count in its order."""

    record: PlanRecord
    columns: dict[str, Floats]
    """[rows] each: values known before rows are read, as columns to add to them."""
    micro_batches: list[MicroBatches]
    mini_batches: list[int]
    """Micro-batches in each update of a batch, on every rank; empty if it has one update."""


class RankPortion(NamedTuple):
    rows: list[int]
    columns: dict[str, Floats]
    """[len(rows)] each."""
    micro_batches: MicroBatches
    mini_batches: list[int]
    """Micro-batches in each update, see `Portion`."""


class Comparison(NamedTuple):
    """How the rewards of siblings are compared."""

    algorithm: Algorithm
    siblings: int
    longest: int
    """Most tokens of a response."""
    masks_errors: bool = False
    """Whether episodes with a failed reward are excluded."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        siblings, longest = config.rollout.samples_per_prompt, config.rollout.max_new_tokens
        return cls(config.algorithm, siblings, longest, config.reward.masks_errors)


class Standing(NamedTuple):
    """The worth of P prompt groups of G episodes, before any row is read."""

    worth: Floats
    """[P, G] advantages."""
    teaches: npt.NDArray[np.bool_]
    """[P, G] episodes to train on."""
    spread: npt.NDArray[np.bool_]
    """[P] groups whose rewards differ, before a length penalty, and that have trained episodes."""
    truncated: npt.NDArray[np.bool_]
    """[P] groups left without trained episodes because responses were cut off."""


class Batch:
    """A batch on rank 0: deals out its portions, and keeps its statistics."""

    def __init__(self, config: RunConfig, reader: Reader) -> None:
        self._config, self._reader = config, reader
        self._comparison = Comparison.of(config)
        self._indices: list[BatchIndex] = []
        self._parts: list[Mapping[str, npt.NDArray[Any]]] = []
        """Parts of the rewards of each portion."""
        self._load = [0] * config.actor.layout.data_parallel
        self._num_micro_batches = 0

    def deal(self, record: PlanRecord) -> Portion:
        """Deals out a portion; no other rank reads its row columns.

        A row that teaches nothing is left out, and does not count in the loss's mean.

        Raises:
            ConfigError: a row is longer than actor.tokens_per_micro_batch.
            BusError: a shard is missing or damaged.
        """
        index = self._reader.index(record)
        columns, teaching = values_of(index, self._comparison)
        groups = (np.cumsum(index.segment == 0) - 1) // self._comparison.siblings
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
        """Deals out `rows` for one update, balanced together with earlier portions."""
        is_part = self._config.algorithm.mini_batches > 1  # every update waits for its slowest rank
        load = None if is_part else self._load
        dealt = deal_rows(self._config.actor, lengths, rows, shards, load=load)
        self._num_micro_batches += len(dealt[0])
        for rank, batches in enumerate(dealt):
            self._load[rank] += sum(int(lengths[batch].sum()) for batch in batches)
        return dealt

    def describe(self, step: int) -> dict[str, float]:
        """Returns statistics of the batch as sampled; means are over episodes."""
        index = BatchIndex(*map(np.concatenate, zip(*self._indices, strict=True)))
        first = np.flatnonzero(index.segment == 0)
        rewards = rewards_of(index, self._comparison)
        counts = ~np.isnan(rewards)
        # A group without any reward is not solved, and teaches nothing.
        solved = np.fmin.reduce(rewards, axis=1) >= np.float32(
            self._config.reward.advanced.solved_at
        )
        standing = standing_of(index, self._comparison)
        oldest = np.minimum.reduceat(index.policy_version_min.astype(np.int64), first)
        lag = step - 1 - oldest
        mixed = index.policy_version_min != index.policy_version_max
        found = self._means_of_parts(first)
        if counts.any():  # where all have failed there is no mean
            found["reward/mean"] = float(rewards[counts].mean())
        if self._config.schedule.over_age == "mask":
            is_late = lag > self._config.schedule.max_staleness
            found["staleness/over_age"] = float(is_late.mean())
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
        """Returns means over the episodes that have a part; `first` are the first rows of all
        episodes."""
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


def share_of(portion: Portion, dp_rank: int) -> RankPortion:
    """Returns the part of data-parallel rank `dp_rank`, numbered among the rows that it reads."""
    rows, micro_batches = own_rows(portion.micro_batches[dp_rank])
    columns = {name: values[rows] for name, values in portion.columns.items()}
    return RankPortion(rows, columns, micro_batches, portion.mini_batches)


def split_groups(groups: npt.NDArray[np.int64], count: int) -> list[npt.NDArray[np.int64]]:
    """Splits rows into mini-batches of whole prompt groups, in order, as equal as possible.

    Args:
        groups: [rows] prompt group of each, rising.
        count: mini-batches; fewer if there are fewer groups, one if there is no row.

    Returns:
        Row numbers of each.
    """
    if count == 1 or not len(groups):
        return [np.arange(len(groups))]
    present = np.array_split(np.unique(groups), count)
    return [np.flatnonzero(np.isin(groups, part)) for part in present if len(part)]


def values_of(
    index: BatchIndex, comparison: Comparison
) -> tuple[dict[str, Floats], npt.NDArray[np.int64]]:
    """Returns the algorithm's values for the rows of a portion, before any is read.

    Every row of an episode has the advantage of the episode.

    Args:
        index: whole and contiguous groups.

    Returns:
        `advantages`, and unless tokens count the same `weights` and `counts`, [rows] in plan order;
        and the numbers of the rows that teach, rising.

    Raises:
        ConfigError: the algorithm needs a reward of every sibling.
    """
    algorithm, siblings, longest, _ = comparison
    standing = standing_of(index, comparison)
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


def standing_of(index: BatchIndex, comparison: Comparison) -> Standing:
    """Compares siblings; see `values_of`."""
    algorithm, rewards = comparison.algorithm, rewards_of(index, comparison)
    counts = ~np.isnan(rewards)
    episode = np.cumsum(index.segment == 0) - 1
    lengths = np.bincount(episode, index.response_len).astype(np.int64).reshape(rewards.shape)
    cut = np.bincount(episode, index.finish == FinishReason.LENGTH).reshape(rewards.shape) > 0
    compared = algorithm.groups.compare(rewards, lengths, comparison.longest).astype(np.float32)
    found = algorithm.advantage.of_groups(Rows(compared, lengths * counts))
    worth = np.where(counts, found, 0)
    if not counts.all() and not np.isfinite(worth).all():
        raise _unequal_to_errors(algorithm)
    trained = counts & algorithm.groups.select_trained(cut)
    spread = np.not_equal(worth, 0).any(axis=1, keepdims=True)
    teaches = trained & (algorithm.teaches_without_advantage | spread)
    differ = np.fmin.reduce(rewards, axis=1) < np.fmax.reduce(rewards, axis=1)
    is_left = trained.any(axis=1)
    truncated = np.logical_and(counts.any(axis=1), ~is_left)
    return Standing(worth, teaches, np.logical_and(differ, is_left), truncated)


def rewards_of(index: BatchIndex, comparison: Comparison) -> npt.NDArray[np.float32]:
    """Returns [P, G] rewards of episodes; NaN for failed ones, if these are excluded."""
    begins = index.segment == 0
    rewards: npt.NDArray[np.float32] = index.rewards[begins].astype(np.float32)
    if comparison.masks_errors:
        rewards[index.reward_error[begins] != 0] = np.nan
    return rewards.reshape(-1, comparison.siblings)


def check_errors(algorithm: Algorithm) -> None:
    """Checks that an algorithm works without the reward of a sibling.

    Raises:
        ConfigError: it does not.
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
    """Returns [rows] tokens, prompt and response."""
    return index.prompt_len.astype(np.int64) + index.response_len.astype(np.int64)


def name_shards(run_dir: Path, guids: Iterable[int], parts: Iterable[ShardRange]) -> dict[int, str]:
    """Returns guid -> shard, below the run directory, for the first rows of each part."""
    bus = RunPaths(run_dir).bus
    return {
        guid: str(bus.shard(part.producer, part.fence, part.seq).relative_to(run_dir))
        for guid, part in zip(guids, parts, strict=True)
    }


def shards_of(parts: Sequence[ShardRange]) -> npt.NDArray[np.int64]:
    numbers: dict[str, int] = {}
    of_part = [numbers.setdefault(part.uuid, len(numbers)) for part in parts]
    return np.repeat(of_part, [part.hi - part.lo for part in parts]).astype(np.int64)


def judge_of(config: RunConfig) -> Judge | None:
    """Returns the rule by which groups are skipped; None if none are."""
    groups = config.algorithm.groups
    if not isinstance(groups, Refill):
        return None
    comparison = Comparison.of(config)

    def judge(index: BatchIndex) -> Sequence[GroupVerdict]:
        standing, rewards = standing_of(index, comparison), rewards_of(index, comparison)
        retired = (index.finish[index.segment == 0] == FinishReason.RETIRED).reshape(
            -1, comparison.siblings
        )
        never_asked = retired.all(axis=1)
        rewards[never_asked] = np.nan
        teaching = ~never_asked & standing.spread & standing.teaches.any(axis=1)
        solved = np.fmin.reduce(rewards, axis=1) >= np.float32(config.reward.advanced.solved_at)
        solved |= never_asked
        means = [_mean(row[~np.isnan(row)].tolist()) for row in rewards]
        columns = [each.tolist() for each in (teaching, solved, standing.truncated, never_asked)]
        return [
            GroupVerdict(teaches, is_solved, mean, truncated, is_retired)
            for mean, (teaches, is_solved, truncated, is_retired) in zip(
                means, zip(*columns, strict=True), strict=True
            )
        ]

    return judge


def most_skipped(config: RunConfig) -> int:
    schedule = config.schedule
    return MOST_BATCHES * schedule.prompts_per_step * (schedule.max_staleness + 1)


def with_skipped(
    described: Mapping[str, float], skipped: Sequence[SkippedGroup], config: RunConfig
) -> dict[str, float]:
    rewards = [group.reward for group in skipped if group.reward is not None]
    if "reward/mean" in described:  # else all rewards of the batch have failed
        rewards += [described["reward/mean"]] * config.schedule.prompts_per_step
    sampled = _mean(rewards)
    return {
        **({} if sampled is None else {"reward/sampled": sampled}),
        "groups/skipped": len(skipped),
        "groups/skipped_solved": sum(group.solved for group in skipped),
        "groups/skipped_retired": sum(group.retired for group in skipped),
    }


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
