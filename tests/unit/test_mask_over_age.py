"""Which tokens leave the loss when they are too old, on rows worked by hand."""

import numpy as np
import pytest
from roles import role_fakes

from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.schema import Trajectory


def row(version_runs, loss_mask):
    made = role_fakes.row(prompt=2, response=len(loss_mask) - 2, mask=loss_mask)
    return made._replace(version_runs=np.array(version_runs, np.int32).reshape(-1, 2))


# tokens 0-1 given; 2-4 by policy 5, of which 3 is a tool's; 5-6 by policy 6, 7 by policy 7
RUNS, MASK = [(2, 5), (5, 6), (7, 7)], [0, 0, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("step", "max_staleness", "expected"),
    [
        (8, 2, [0, 0, 1, 0, 1, 1, 1, 1]),  # 8 - 1 - 5 = 2: just young enough
        (8, 1, [0, 0, 0, 0, 0, 1, 1, 1]),
        (9, 2, [0, 0, 0, 0, 0, 1, 1, 1]),
        (8, 0, [0, 0, 0, 0, 0, 0, 0, 1]),  # on-policy: only what policy 7 sampled
        (20, 2, [0] * 8),
    ],
)
def test_tokens_of_policies_beyond_the_bound_leave_the_loss(step, max_staleness, expected):
    masked = mask_over_age(row(RUNS, MASK), step=step, max_staleness=max_staleness)
    assert masked.loss_mask.tolist() == expected


def test_only_the_mask_changes_and_only_in_a_copy():
    before = row(RUNS, MASK)
    masked = mask_over_age(before, step=8, max_staleness=0)
    assert before.loss_mask.tolist() == MASK
    for name in Trajectory._fields:
        assert name == "loss_mask" or getattr(masked, name) is getattr(before, name)


def test_a_policy_that_samples_again_after_a_restart_is_judged_by_its_run():
    """An engine that was given older weights: the last run is older than the one before."""
    masked = mask_over_age(row([(2, 7), (5, 4)], MASK), step=8, max_staleness=1)
    assert masked.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
