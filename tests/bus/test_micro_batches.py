"""Who trains which rows: exact small plans, then what must hold for every long-tailed batch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.errors import ConfigError
from relax_hpc.roles.dealing.micro_batches import SHARD_TOLERANCE, imbalance, plan_micro_batches


def lognormal(rng, n, cap):
    """Siblings of a prompt resemble each other."""
    groups = np.repeat(rng.normal(0, 0.7, -(-n // 8)), 8)[:n]
    return np.minimum(np.exp(np.log(2500) + groups + rng.normal(0, 0.7, n)) + 32, cap).astype(int)


def pareto(rng, n, cap):
    return np.minimum(rng.pareto(1.2, n) * 800 + 200, cap).astype(int)


def tokens(lengths, plan):
    return [sum(lengths[row] for rows in rank for row in rows) for rank in plan]


def check(lengths, plan, budget, multiple=1):
    """Asserts the rules that no plan may break."""
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[row] for row in rows) <= budget for rank in plan for rows in rank)
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0


def readers(shards, plan):
    return sum(len({shards[row] for rows in rank for row in rows}) for rank in plan)


def test_a_plan_worked_by_hand():
    # longest first to the rank with most room: 9 | 7, 6 -> 9, 2 | 7, 6 -> 9, 2, 2 | 7, 6;
    # 10 tokens at a time, rank 1 needs two micro-batches, so rank 0 gets two of about a size
    lengths = [2, 9, 6, 2, 7]
    assert plan_micro_batches(lengths, num_ranks=2, budget=10) == [[[1], [0, 3]], [[4], [2]]]


def test_rows_that_fill_the_budget_exactly_share_a_micro_batch():
    assert plan_micro_batches([3, 7, 5, 2, 5, 8], num_ranks=1, budget=10) == [
        [[0, 1], [2, 4], [3, 5]]
    ]


@pytest.mark.parametrize("draw", [lognormal, pareto])
@pytest.mark.parametrize("cap", [8192, 32768])
@pytest.mark.parametrize(("num_ranks", "rows_per_rank"), [(8, 64), (64, 16)])
def test_ranks_are_within_5_percent_and_few_micro_batches_are_made(
    draw, cap, num_ranks, rows_per_rank
):
    for seed in range(3):
        lengths = draw(np.random.default_rng(seed), num_ranks * rows_per_rank, cap).tolist()
        shards = [row // 128 for row in range(len(lengths))]
        plan = plan_micro_batches(lengths, num_ranks=num_ranks, budget=cap, shards=shards)
        check(lengths, plan, cap)
        mean = sum(lengths) / num_ranks
        assert imbalance(tokens(lengths, plan)) <= max(0.05, max(lengths) / mean - 1)
        assert len(plan[0]) <= 1.05 * math.ceil(max(mean, max(lengths)) / cap) + 1


def test_rows_of_a_shard_stay_together_and_the_balance_does_not_suffer():
    lengths = lognormal(np.random.default_rng(0), 1024, 32768).tolist()
    shards = [row // 128 for row in range(1024)]  # 8 shards over 64 ranks
    free = plan_micro_batches(lengths, num_ranks=64, budget=32768)
    near = plan_micro_batches(lengths, num_ranks=64, budget=32768, shards=shards)
    check(lengths, near, 32768)
    assert readers(shards, free) > 400
    assert readers(shards, near) <= 64 + 8  # a shard's last rank is the next one's first
    assert imbalance(tokens(lengths, near)) <= 0.02


def test_shards_are_torn_apart_where_the_balance_needs_it():
    lengths, shards = [10, 10, 1, 1], [0, 0, 1, 1]  # one rank per shard would be 20 against 2
    plan = plan_micro_batches(lengths, num_ranks=2, budget=20, shards=shards)
    assert tokens(lengths, plan) == [11, 11]


def test_what_earlier_portions_left_uneven_is_made_up_for():
    load = [100, 40, 60]
    lengths = [10] * 10  # 300 in all: 100 each
    plan = plan_micro_batches(lengths, num_ranks=3, budget=50, load=load)
    assert tokens(lengths, plan) == [0, 60, 40]
    check(lengths, plan, 50)


@settings(deadline=None, max_examples=300)
@given(
    rows=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5)), max_size=60),
    load=st.lists(st.integers(0, 2000), min_size=1, max_size=9),
    budget=st.integers(100, 300),
    multiple=st.integers(1, 4),
    near=st.booleans(),
)
def test_no_rows_loads_and_shards_make_a_plan_that_breaks_a_rule(
    rows, load, budget, multiple, near
):
    lengths = [length for length, _ in rows]
    plan = plan_micro_batches(
        lengths,
        num_ranks=len(load),
        budget=budget,
        count_multiple_of=multiple,
        load=load,
        shards=[shard for _, shard in rows] if near else None,
    )
    check(lengths, plan, budget, multiple)
    # whoever got something is at most one row above the level that all could have been at
    after = [a + b for a, b in zip(load, tokens(lengths, plan), strict=True)]
    mean = sum(after) / len(after)
    limit = max([*load, SHARD_TOLERANCE * mean + mean, mean + max(lengths, default=0)])
    if max(load) <= mean:
        assert max(after) <= limit + 1e-6


def test_micro_batches_that_run_together_are_alike():
    lengths = lognormal(np.random.default_rng(1), 16 * 64, 8192).tolist()
    plan = plan_micro_batches(lengths, num_ranks=16, budget=8192)
    sizes = [[sum(lengths[row] for row in rows) for rows in rank] for rank in plan]
    assert all(rank == sorted(rank, reverse=True) for rank in sizes)
    slowest = sum(max(together) for together in zip(*sizes, strict=True))
    assert slowest <= 1.1 * sum(lengths) / 16


def test_a_trajectory_beyond_the_budget_is_an_error_that_names_the_setting():
    with pytest.raises(ConfigError, match=r"tokens_per_micro_batch = 10: .* 11 tokens"):
        plan_micro_batches([3, 11], num_ranks=2, budget=10)
