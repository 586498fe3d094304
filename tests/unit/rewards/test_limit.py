"""How many rewards may fail before a run ends: counted by hand."""

import pytest

from relax_hpc.environments.rewards.contract import Score, fail
from relax_hpc.environments.rewards.scorer import (
    LEAST,
    WINDOW,
    ErrorLimit,
)
from relax_hpc.errors import RewardError

GOOD, BAD = Score(1.0), fail("ValueError: a bug")


def feed(limit, scores, first=0):
    """Gives them one at a time; the number of those that were taken."""
    for number, score in enumerate(scores):
        try:
            limit.add({f"{first + number}/0": score})
        except RewardError as error:
            return number, str(error)
    return len(scores), ""


def test_a_run_ends_when_more_than_the_allowed_part_of_the_window_failed():
    """0.05 of 500 are 25: the 26th ends it, and it is the 260th sample here."""
    taken, said = feed(ErrorLimit(0.05), ([GOOD] * 9 + [BAD]) * 40)
    assert taken == 259
    assert said == (
        "reward.advanced.most_errors = 0.05: the reward failed for 26 of the last 260 samples, "
        "among them, by guid/sibling, 26 x ValueError: a bug, first in 9/0; correct the reward, "
        "or allow more, and submit a run of another name: resume keeps both"
    )


def test_nothing_ends_before_there_are_enough_samples_to_judge_by():
    assert feed(ErrorLimit(0.05), [BAD] * 300)[0] == LEAST - 1


def test_errors_leave_the_window_again():
    """25 in every 500 for ever are allowed; with 26 it ends within the second window."""
    assert feed(ErrorLimit(0.05), ([BAD] * 25 + [GOOD] * 475) * 10)[0] == 10 * WINDOW
    taken, _ = feed(ErrorLimit(0.05), [BAD] * 25 + [GOOD] * 475 + [BAD] * 25 + [GOOD] * 10 + [BAD])
    assert taken == WINDOW + 25 + 10


@pytest.mark.parametrize(("most", "ends"), [(0.0, True), (1.0, False)])
def test_none_or_all_may_fail(most, ends):
    taken, _ = feed(ErrorLimit(most), [GOOD] * 400 + [BAD] * 600)
    assert taken == (400 if ends else 1000)
