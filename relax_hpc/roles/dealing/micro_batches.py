"""Deals rows to data-parallel ranks in micro-batches. Pure arithmetic.

One process plans and sends the plan to the others. The same input gives the same plan anywhere.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.config.model import MegatronConfig
from relax_hpc.errors import ConfigError

Numbers = npt.NDArray[np.int64]
MicroBatches = list[list[int]]
"""Row numbers per micro-batch of one rank."""

SHARD_TOLERANCE = 0.02
"""Imbalance of tokens that is accepted to give a shard fewer readers."""


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    budget: int,
    count_multiple_of: int = 1,
    load: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
) -> list[MicroBatches]:
    """Deals rows to data-parallel ranks by tokens, and packs each rank's into micro-batches.

    Every row is in one micro-batch of one rank. All ranks have the same number of micro-batches,
    because pipeline and expert parallelism step through them together; the surplus is empty lists.
    Micro-batches come largest first, so concurrent ones are similar in size, and running out of
    memory shows at once.

    Args:
        budget: most tokens of a micro-batch.
        count_multiple_of: the number of micro-batches per rank is a multiple of it.
        load: tokens that each rank has from earlier portions of the same batch.
        shards: number of the shard of each row. A rank opens every shard it has rows of, so rows of
            a shard go to few ranks, as far as the balance allows.

    Returns:
        Per rank, its micro-batches; none at all if there are no rows.

    Raises:
        ConfigError: a row is longer than the budget.

    Source: longest first to the least loaded, R. L. Graham, SIAM J. Appl. Math. 17 (1969). On
    long-tailed lengths with 16 rows per rank it is within 0.6 % of an even split, in a hundredth of
    the time of the largest differencing method (Karmarkar and Karp, 1982), which verl uses.
    """
    longest = max(lengths, default=0)
    if longest > budget:
        raise ConfigError(
            f"actor.tokens_per_micro_batch = {budget}: a trajectory has {longest} tokens; raise "
            "it, or lower rollout.max_new_tokens or prompts.max_prompt_tokens"
        )
    ranks = _deal(lengths, shards, list(load or [0] * num_ranks))
    packed = [_pack(rows, lengths, budget) for rows in ranks]
    needed = max(map(len, packed))
    count = -(-needed // count_multiple_of) * count_multiple_of
    return [
        _even(rows, lengths, budget, count) or _pad(bins, lengths, count)
        for rows, bins in zip(ranks, packed, strict=True)
    ]


def deal_rows(
    config: MegatronConfig,
    lengths: Numbers,
    rows: Numbers,
    shards: Numbers | None = None,
    *,
    load: Sequence[int] | None = None,
) -> list[MicroBatches]:
    """Plans the micro-batches of some rows, which keep their numbers, for the ranks of a layout.

    Args:
        lengths: [rows of all] tokens.
        rows: numbers of those dealt out.
        shards: [rows of all] as in `plan_micro_batches`.
    """
    dealt = plan_micro_batches(
        lengths[rows].tolist(),
        num_ranks=config.layout.data_parallel,
        budget=config.tokens_per_micro_batch,
        count_multiple_of=config.layout.micro_batches_multiple_of,
        load=load,
        shards=None if shards is None else shards[rows].tolist(),
    )
    return [[rows[batch].tolist() for batch in rank] for rank in dealt]


class OwnRows(NamedTuple):
    """One rank's part of the rows dealt out."""

    rows: list[int]
    """Numbers among all rows, rising."""
    micro_batches: MicroBatches


def own_rows(mine: MicroBatches) -> OwnRows:
    """Returns the micro-batches of a rank, numbered among its own rows."""
    rows = sorted(row for batch in mine for row in batch)
    place = {row: index for index, row in enumerate(rows)}
    return OwnRows(rows, [[place[row] for row in batch] for batch in mine])


def imbalance(tokens: Sequence[int]) -> float:
    """Returns how far the fullest rank is above the mean, as a fraction of the mean; 0 without
    tokens."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total - 1 if total else 0.0


def _deal(lengths: Sequence[int], shards: Sequence[int] | None, load: list[int]) -> list[list[int]]:
    """Returns rows per rank: shard by shard if that is balanced, else regardless of shards."""
    free = _deal_shards(lengths, [0] * len(lengths), load)
    if shards is None or len(load) == 1:
        return free
    near = _deal_shards(lengths, shards, load)
    fullest, fullest_near = (
        max(
            sum(lengths[row] for row in rows) + before for rows, before in zip(r, load, strict=True)
        )
        for r in (free, near)
    )
    mean = (sum(lengths) + sum(load)) / len(load)
    return near if fullest_near <= max(fullest, (1 + SHARD_TOLERANCE) * mean) else free


def _deal_shards(lengths: Sequence[int], shards: Sequence[int], load: list[int]) -> list[list[int]]:
    """Deals the shards in turn, each to as many consecutive ranks as it has tokens for.

    Within a shard the longest row goes first, to the rank with the most room for this shard. A
    rank's surplus or deficit is evened out by the rank that it shares with the next shard.
    """
    level = _water_level(load, sum(lengths))
    room = [level - before for before in load]
    ranks: list[list[int]] = [[] for _ in load]
    rows_of: dict[int, list[int]] = {}
    for row, shard in enumerate(shards):
        rows_of.setdefault(shard, []).append(row)
    rank = 0
    for rows in rows_of.values():
        rest = float(sum(lengths[row] for row in rows))
        quotas: list[tuple[float, int]] = []  # negative: the heap's first has the most
        while not quotas or rest > 0:
            rank += bool(quotas)
            quota = rest if rank == len(load) - 1 else min(max(room[rank], 0.0), rest)
            quotas.append((-quota, rank))
            rest -= quota
        heapify(quotas)
        for row in _longest_first(rows, lengths):
            quota, target = quotas[0]
            heapreplace(quotas, (quota + lengths[row], target))
            ranks[target].append(row)
            room[target] -= lengths[row]
    return ranks


def _water_level(load: Sequence[int], tokens: int) -> float:
    """Returns the level to which `tokens` fill the ranks below it."""
    level, below = 0.0, 0
    for count, before in enumerate(sorted(load), start=1):
        if count > 1 and level <= before:
            break
        below += before
        level = (below + tokens) / count
    return level


def _pack(rows: Iterable[int], lengths: Sequence[int], budget: int) -> MicroBatches:
    """Packs rows, longest first, each into the fullest micro-batch with room for it."""
    bins: MicroBatches = []
    room: list[tuple[int, int]] = []  # rising
    for row in _longest_first(rows, lengths):
        length = lengths[row]
        place = bisect_left(room, (length, -1))
        if place < len(room):
            free, target = room.pop(place)
        else:
            free, target = budget, len(bins)
            bins.append([])
        bins[target].append(row)
        insort(room, (free - length, target))
    return bins


def _even(
    rows: Iterable[int], lengths: Sequence[int], budget: int, count: int
) -> MicroBatches | None:
    """Returns `count` micro-batches of about equal size, or None if one would exceed the budget."""
    bins: MicroBatches = [[] for _ in range(count)]
    heap = [(0, target) for target in range(count)]
    for row in _longest_first(rows, lengths):
        tokens, target = heap[0]
        if tokens + lengths[row] > budget:
            return None
        bins[target].append(row)
        heapreplace(heap, (tokens + lengths[row], target))
    return _pad(bins, lengths, count)


def _pad(bins: MicroBatches, lengths: Sequence[int], count: int) -> MicroBatches:
    """Sorts largest first, then appends empty micro-batches up to `count`; rows rise within
    each."""
    largest_first = sorted(bins, key=lambda rows: (-sum(lengths[row] for row in rows), rows))
    return [sorted(rows) for rows in largest_first] + [[] for _ in range(count - len(bins))]


def _longest_first(rows: Iterable[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))
