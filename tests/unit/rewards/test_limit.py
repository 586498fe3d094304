"""How many rewards may fail before a run ends: counted by hand."""

import pytest

from relax_hpc.errors import RewardError
from relax_hpc.rewards.contract import Score, failed
from relax_hpc.rewards.limit import LEAST, WINDOW, ErrorLimit

GOOD, BAD = Score(1.0), failed("ValueError: a bug")


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
        "reward.most_errors = 0.05: the reward failed for 26 of the last 260 samples, among them, "
        "by guid/sibling, 9/0: ValueError: a bug; 19/0: ValueError: a bug; 29/0: ValueError: a "
        "bug; 39/0: ValueError: a bug; 49/0: ValueError: a bug; correct the reward, or allow more"
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


def test_who_is_told_so_is_not_started_again():
    assert RewardError.is_final
