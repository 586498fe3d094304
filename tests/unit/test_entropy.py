"""The weight of the entropy in the loss, step by step and by hand."""

import pytest

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.entropy import EntropyState


def weights(entropy, measured):
    """Weights of the steps that follow on these entropies, the first step's in front."""
    part = algorithm_of(entropy=entropy).entropy
    state, found = part.first(), [part.first().weight]
    for each in measured:
        state = part.after(state, each)
        found.append(state.weight)
    return found


def test_without_a_table_it_is_only_measured_and_rows_without_advantage_teach_nothing():
    for nothing in ({"name": "none"}, {"coefficient": 0.0}):
        assert weights(nothing, [0.1, 0.3]) == [0.0] * 3
        assert not algorithm_of(entropy=nothing).needs.every_row


def test_a_fixed_bonus_is_the_same_in_every_step_and_works_on_every_row():
    assert weights({"coefficient": 0.01}, [0.1, 0.3]) == [0.01] * 3
    assert algorithm_of(entropy={"coefficient": 0.01}).needs.every_row


def test_an_adaptive_one_rises_below_the_target_falls_above_and_rests_there():
    """The coefficient is 0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.1; above the target none is applied."""
    entropy = {"name": "adaptive", "target": 0.5, "step": 0.1, "largest": 0.3}
    measured = [0.4, 0.4, 0.1, 0.6, 0.7, 0.2, 0.5]
    found = weights(entropy, measured)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3, 0, 0, 0.2, 0.1])


def test_its_coefficient_stays_between_zero_and_the_largest():
    part = algorithm_of(entropy={"name": "adaptive", "target": 1.0, "largest": 0.3, "step": 0.2})
    assert part.entropy.after(EntropyState(0.2, 0.2), 0.5).coefficient == 0.3
    assert part.entropy.after(EntropyState(0.1, 0.1), 2.0).coefficient == 0.0
