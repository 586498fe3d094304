"""The comparison says why it cannot be made."""

import against_transfer_queue
import pytest


@pytest.mark.skipif(not against_transfer_queue.missing(), reason="TransferQueue is installed")
def test_without_transfer_queue_it_says_so_and_compares_nothing(tmp_path):
    assert "TransferQueue==0.1.11" in against_transfer_queue.missing()
    assert list(against_transfer_queue.measure(tmp_path, 3)) == []
