"""The order of prompts: a pure function of the seed, with exact shares and local reads."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.data import order
from relax_hpc.data.order import (
    Blocks,
    DataSource,
    Epochs,
    Grades,
    Mixture,
    Permutation,
    RowOrder,
    grades_of,
    shares,
)  # fmt: skip
from relax_hpc.errors import ConfigError

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(sum)


@given(st.integers(1, 3000), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_permutation_has_every_number_once(size, seed):
    permutation = Permutation(size, seed)
    assert sorted(permutation[place] for place in range(size)) == list(range(size))


@given(SIZES, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_has_every_row_once_whatever_the_blocks(sizes, window, seed, epoch):
    epochs, count = Epochs(Blocks(sizes, window), seed), sum(sizes)
    assert len(epochs) == count
    drawn = [epochs[epoch * count + place] for place in range(count)]
    assert sorted(drawn) == list(range(count))


def test_rows_are_read_from_a_window_of_blocks_at_a_time_and_shuffled_within():
    epochs = Epochs(Blocks([10] * 12, 3), 0)
    for epoch in range(3):
        drawn = [epochs[epoch * 120 + place] for place in range(120)]
        windows = [drawn[first : first + 30] for first in range(0, 120, 30)]
        assert [len({row // 10 for row in window}) for window in windows] == [3] * 4
        assert all(window != sorted(window) for window in windows)


def test_epochs_seeds_and_names_have_orders_of_their_own_and_without_a_seed_rows_rise():
    blocks = Blocks([50, 50], 1)
    first, other, named, rising = (
        Epochs(blocks, *how) for how in [(0,), (1,), (0, "name"), (None,)]
    )
    ways = [(first, 0), (first, 100), (other, 0), (named, 0), (rising, 100)]
    orders = [tuple(epochs[start + n] for n in range(100)) for epochs, start in ways]
    assert len(set(orders)) == 5
    assert orders[-1] == tuple(range(100))


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=9), st.integers(1, 2000))
def test_shares_are_whole_add_up_and_are_off_by_less_than_one(weights, total):
    found = shares(weights, total)
    assert sum(found) == total
    for weight, count in zip(weights, found, strict=True):
        assert abs(count - Fraction(weight) * total / sum(map(Fraction, weights))) < 1


def test_the_largest_remainders_get_what_is_left_the_first_of_equal_ones_before_others():
    assert shares([1, 1, 1], 1000) == [334, 333, 333]
    assert shares([0.5, 0.3, 0.2], 10) == [5, 3, 2]
    assert shares([5, 3, 1], 10) == [6, 3, 1]  # 5.56 3.33 1.11


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(0, 9), st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_every_block_of_a_mixture_has_the_exact_shares_and_each_source_goes_on_in_turn(
    weights, block, seed
):
    mixture, counts = Mixture(weights, seed), shares(weights, 1000)
    turns = [mixture[block * 1000 + place] for place in range(1000)]
    for source, count in enumerate(counts):
        own = [turn.ordinal for turn in turns if turn.source == source]
        assert own == list(range(block * count, (block + 1) * count))
    longest = max(counts)  # taken one after the other, one source would have them all at first
    assert len({turn.source for turn in turns[:longest]}) > 1


@given(SIZES, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_a_graded_epoch_has_every_row_once_and_rises(sizes, window, seed, epoch, data):
    count = sum(sizes)
    grades = bytes(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    graded = Grades(Blocks(sizes, window), grades, seed)
    drawn = [graded[epoch * count + place] for place in range(count)]
    assert sorted(drawn) == list(range(count))
    assert [grades[row] for row in drawn] == sorted(grades)


def test_rows_of_a_grade_are_shuffled_and_anew_each_epoch():
    graded = Grades(Blocks([50, 50], 2), bytes([1, 0] * 50), 0)
    first, second = ([graded[e * 100 + n] for n in range(50)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1, 100, 2))
    assert first != second and first != sorted(first)


def test_grades_are_tenths_by_value_and_equal_values_are_of_one_grade():
    values = [(n * 7919) % 1000 / 8 for n in range(1000)]
    grades = grades_of(np.array(values))
    assert [grades.count(grade) for grade in range(10)] == [100] * 10
    third, fourth = ({v for v, g in zip(values, grades, strict=True) if g == n} for n in (3, 4))
    assert max(third) < min(fourth)
    equal = np.array([3.0, 1, 2, 1, 3, 3, 1, 2, 3, 1])
    assert grades_of(equal) == bytes([2, 0, 1, 0, 2, 2, 0, 1, 2, 0])
    assert grades_of(np.array([5.0])) == bytes([0])


def test_a_source_that_would_never_have_a_turn_is_refused():
    with pytest.raises(ConfigError, match=r"weight = 0.1: of 1,000 prompts none .* 1 or more"):
        Mixture([1000, 0.1], 0)


def test_without_a_seed_sources_follow_each_other_and_ordinals_start_at_0():
    sources = [DataSource("a", Blocks([2], 1), 3.0), DataSource("b", Blocks([1, 2], 1), 1.0)]
    plain = RowOrder(sources, None)
    assert [plain[ordinal] for ordinal in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    with pytest.raises(IndexError, match="start at 0"):
        plain[-1]


MIX = [DataSource("a", Blocks([3, 2, 4], 2), 2.0), DataSource("b", Blocks([5], 1), 1.0)]
FROZEN = [10, 1, 0, 13, 8, 12, 2, 7, 6, 5, 4, 3]


def test_the_order_is_the_one_that_runs_were_begun_with():
    """Whoever changes it raises `order.VERSION`, and writes down the new one here."""
    frozen, one = RowOrder(MIX, 7), Epochs(MIX[0].blocks, 7, "a")
    assert [frozen[ordinal] for ordinal in range(12)] == FROZEN
    assert frozen[10**12] == 9
    assert [one[n] for n in range(18)] == [1, 0, 8, 2, 7, 6, 5, 4, 3, 8, 7, 4, 6, 5, 3, 2, 1, 0]
    assert order.VERSION == 2
