"""The tensors of a micro-batch."""

import numpy as np
import pytest
import torch
from trainers import trajectories, valued

from relax_hpc.schema import COLUMNS, Column
from relax_hpc.trainer.megatron import packing


def test_documents_lie_end_to_end_with_positions_from_zero():
    rows, advantages = trajectories(3)
    rows = valued(rows, advantages)
    batch = packing.build(rows, [2, 0], device=torch.device("cpu"))
    a, b = rows[2], rows[0]
    total = len(a.token_ids) + len(b.token_ids)
    assert batch.cu_seqlens.tolist() == [0, len(a.token_ids), total]
    assert batch.token_ids.tolist() == [*a.token_ids, *b.token_ids]
    assert batch.position_ids.tolist() == [*range(len(a.token_ids)), *range(len(b.token_ids))]
    assert batch.loss_mask.tolist() == [bool(x) for x in [*a.loss_mask, *b.loss_mask]]
    assert torch.equal(batch.is_first.nonzero()[:, 0], torch.tensor([0, len(a.token_ids)]))
    first, last = float(batch.columns["advantages"][0]), float(batch.columns["advantages"][-1])
    assert (first, last) == (pytest.approx(advantages[2]), pytest.approx(advantages[0]))


def test_tokens_know_their_sequence_and_sequences_their_group(monkeypatch):
    declared = Column("float32", "row", "critic", "how good it is on the whole")
    monkeypatch.setitem(COLUMNS, "row/verdict", declared)
    rows, advantages = trajectories(3)
    rows = valued(rows, advantages)
    rows = [row.with_columns(verdict=np.float32(row.guid + 0.5)) for row in rows]
    a, b = rows[2], rows[0]
    sizes = [len(a.token_ids), len(b.token_ids)]
    padding = -sum(sizes) % 64
    batch = packing.build(rows, [2, 0], device=torch.device("cpu"), multiple_of=64)
    assert batch.sequence_ids.tolist() == [0] * sizes[0] + [1] * sizes[1] + [2] * padding
    assert batch.groups.tolist() == [a.guid, b.guid, -1]
    verdicts = [a.guid + 0.5] * sizes[0] + [b.guid + 0.5] * sizes[1] + [0.0] * padding
    assert batch.columns["verdict"].tolist() == verdicts
    sampled = [*a.columns["rollout_logprobs"], *b.columns["rollout_logprobs"], *[0.0] * padding]
    assert batch.columns["rollout_logprobs"].tolist() == sampled
    mixed = [a, b._replace(columns={"other": np.float32(1)})]
    mixed = packing.build(mixed, [0, 1], device=torch.device("cpu"))
    assert not mixed.columns  # what only some have is no column


def test_the_first_token_is_never_trained_even_if_the_mask_says_so():
    (row,), _ = trajectories(1)
    row = row._replace(loss_mask=np.ones_like(row.loss_mask))
    batch = packing.build([row], [0], device=torch.device("cpu"))
    assert not batch.loss_mask[0]
    assert batch.loss_mask[1:].all()


@pytest.mark.parametrize(("rows", "multiple_of"), [([0], 64), ([], 1), ([], 4)])
def test_what_fills_a_micro_batch_up_is_an_untrained_document(rows, multiple_of):
    made = valued(*trajectories(1, seed=3))
    length = len(made[0].token_ids) if rows else 0
    batch = packing.build(made, rows, device=torch.device("cpu"), multiple_of=multiple_of)
    assert (batch.rows, batch.lengths[-1]) == (tuple(rows), multiple_of - length)
    assert batch.cu_seqlens[-1] == multiple_of
    assert not batch.loss_mask[length:].any()
    for name in ("token_ids", "position_ids"):
        assert len(getattr(batch, name)) == multiple_of
    for name in ("rollout_logprobs", "advantages"):
        assert len(batch.columns[name]) == multiple_of


def test_values_move_to_the_token_they_predict_within_their_document():
    is_first = torch.tensor([True, False, False, True, False])
    values = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0])  # predicts tokens 1, 2, none, 4, none
    assert packing.at_predicted_token(values, is_first).tolist() == [0, 10, 11, 0, 13]
    assert packing.next_tokens(torch.tensor([4, 5, 6, 7, 8])).tolist()[:2] == [5, 6]
