"""Features in host memory: where they lie, and what a micro-batch brings and gives back."""

import pytest
import torch

from relax_hpc.trainer.megatron import features
from relax_hpc.trainer.megatron.features import FeatureWindow

GIB_OF_ROWS = 2**30 // (6 * 1024)
"""Features of 1,024 numbers in bfloat16, with gradients in float32."""


@pytest.mark.parametrize(
    ("rows", "learns", "most", "is_needed"),
    [
        (GIB_OF_ROWS, True, 1.0, False),
        (GIB_OF_ROWS + 1, True, 1.0, True),
        (3 * GIB_OF_ROWS, False, 1.0, False),  # a third of it without gradients
        (3 * GIB_OF_ROWS + 3, False, 1.0, True),
        (1, False, 0.0, True),
        (10**9, True, None, False),
    ],
)
def test_more_than_the_bound_lies_in_host_memory(rows, learns, most, is_needed):
    found = features.needs_host_memory(rows, 1024, torch.bfloat16, learns=learns, most=most)
    assert found == is_needed


@pytest.fixture
def window():
    """Tokens that see rows 4, 1, 2 and 1 again, of 6 rows of two levels of one number."""
    values = torch.arange(12.0).view(6, 2)
    gradient = torch.full((6, 2), 100.0)
    return FeatureWindow(
        values, gradient, torch.tensor([4, 1, 2, 1]), torch.device("cpu")
    ), gradient


def test_a_micro_batch_brings_each_row_that_it_sees_once(window):
    seen, _ = window
    assert seen.values.tolist() == [[2.0, 3.0], [4.0, 5.0], [8.0, 9.0]]
    assert seen.values[seen.rows].tolist() == [[8.0, 9.0], [2.0, 3.0], [4.0, 5.0], [2.0, 3.0]]


def test_its_gradient_goes_on_from_what_there_is_and_goes_back_with_the_first_level(window):
    seen, gradient = window
    seen.sum()[:, 1].index_add_(0, seen.rows, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    seen.note_added(1)
    assert gradient.eq(100).all()
    seen.sum()[:, 0].index_add_(0, seen.rows, torch.tensor([10.0, 20.0, 30.0, 40.0]))
    seen.note_added(0)
    assert gradient.tolist() == [
        [100.0, 100.0], [160.0, 106.0], [130.0, 103.0], [100.0, 100.0], [110.0, 101.0],
        [100.0, 100.0],
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="from the last level"):
        seen.sum()
