"""The loop of supervised fine-tuning: order, shares, and the held-out loss by hand."""

import math
from types import SimpleNamespace

import numpy as np
import torch
from role_fakes import Journal, row

from relax_hpc.config.run import SftRunConfig
from relax_hpc.data.documents import Document
from relax_hpc.roles.sft import loop as sft
from relax_hpc.roles.sft.loop import HeldoutLoss, RankBatch, deal, heldout_loss
from relax_hpc.runtime.comm.world import SoloWorld


def config(data_parallel=1, **settings):
    return SftRunConfig.model_validate({
        "name": "run", "model": {"path": "unused"},
        "sft": {"train": "t", "batch_size": 2, "num_steps": 3} | settings,
        "actor": {"layout": {"data_parallel": data_parallel}, "tokens_per_micro_batch": 12},
    })  # fmt: skip


class Trainer:
    dp_rank, skip, costs = 0, None, {"time/forward": 1.0}

    def __init__(self, journal, step=0):
        self.journal, self.step = journal, step

    def accumulate(self, trajectories, micro_batches, objective, *, last):
        assert last
        given = SimpleNamespace(loss_mask=torch.tensor([True, False, True]), columns={})
        assert objective.loss(torch.tensor([-1.0, torch.nan, -2.0]), given)[0] == 3
        self.journal.note("accumulate", [t.guid for t in trajectories], micro_batches)

    def update(self):
        self.step += 1
        self.journal.note("update", self.step)
        return {"loss": 2.0}

    def forward_logprobs(self, trajectories, micro_batches):
        self.journal.note("forward", self.step, [t.guid for t in trajectories], micro_batches)
        return [np.full(len(t.token_ids), -0.5, np.float32) for t in trajectories]

    def stream_weights(self):
        self.journal.note("gather", self.step)
        yield "w", self.step
        self.journal.note("gathered")


class Rank0:
    """Two ranks' shares: rank r has documents 10 r + step."""

    def __init__(self, journal, heldout=True):
        self.journal, self.has_heldout, self.step = journal, heldout, 0

    def next_task(self, step, timers):
        self.step += 1
        return [RankBatch([row(10 * rank + self.step)], [[0]]) for rank in range(2)]

    def heldout(self):
        return (
            [RankBatch([row(77)], [[0]]), RankBatch([], [[]])]
            if self.has_heldout
            else [RankBatch([], [])]
        )

    def note_heldout(self, step, heldout):
        self.journal.note("measured", step, heldout)

    def export(self, tensors):
        self.journal.note("export", dict(tensors))

    def end_step(self, step, fields, timers):
        self.journal.note("end_step", step, fields | timers.seconds)

    def note_skipped(self, step, skip):
        self.journal.note("skipped", step)


def run(journal, *, step=0, rank0=None, trainer=None, **settings):
    trainer = trainer or Trainer(journal, step)
    save = lambda: journal.note("save", trainer.step)  # noqa: E731
    stop = lambda: journal.note("stop", trainer.step)  # noqa: E731
    sft.run(config(**settings), SoloWorld(), trainer, rank0 or Rank0(journal), save, stop)


def test_a_run_measures_first_then_trains_measures_when_due_saves_and_exports_the_last():
    journal = Journal()
    run(journal, heldout_every=2)
    assert [entry[:2] for entry in journal if entry[0] not in ("forward", "gather", "stop")] == [
        ("measured", 0),
        ("accumulate", [1]), ("update", 1), ("save", 1), ("end_step", 1),
        ("accumulate", [2]), ("update", 2), ("measured", 2), ("save", 2), ("end_step", 2),
        ("accumulate", [3]), ("update", 3), ("measured", 3), ("save", 3), ("end_step", 3),
        ("gathered",), ("export", {"w": 3}),
    ]  # fmt: skip
    assert journal.of("stop") == [("stop", 0), ("stop", 1), ("stop", 2)]
    # Three trained tokens of half a nat each.
    assert {entry[2] for entry in journal.of("measured")} == {HeldoutLoss(0.5, 3)}
    fields = journal.of("end_step")[0][2]
    assert (fields["loss"], fields["time/forward"]) == (2.0, 1.0)
    assert "time/train" not in fields and "time/save" in fields


def test_a_resumed_run_does_not_measure_the_first_policy_again_and_a_finished_one_only_exports():
    journal = Journal()
    run(journal, step=2, heldout_every=0)
    assert [entry[1] for entry in journal.of("measured")] == [3]
    assert [entry[1] for entry in journal.of("update")] == [3]
    journal.clear()
    run(journal, step=3)
    assert [entry[0] for entry in journal] == ["gather", "gathered", "export"]


class Rank1:
    """A world of two data-parallel ranks; told what rank 0 has dealt."""

    rank, size = 1, 2

    def __init__(self, rank0):
        self.rank0, self.calls = rank0, 0

    def bcast(self, value):
        assert value is None
        self.calls += 1
        return self.rank0.heldout() if self.calls == 1 else self.rank0.next_task(1, None)

    def allgather(self, value):
        assert value == {}  # it holds none of them
        return [{77: (3.0, 2)}, value]


def test_a_rank_besides_rank_0_trains_its_share_measures_with_the_others_and_gathers():
    journal = Journal()
    trainer = Trainer(journal)
    trainer.dp_rank = 1
    sft.run(
        config(data_parallel=2, heldout_every=0), Rank1(Rank0(journal)), trainer,
        sft.SftDuties(),
        lambda: journal.note("save"), lambda: None,
    )  # fmt: skip
    assert [entry[1] for entry in journal.of("accumulate")] == [[11], [12], [13]]
    assert [entry[1:] for entry in journal.of("forward")] == [(0, [], [[]]), (3, [], [[]])]
    assert [entry[0] for entry in journal[-2:]] == ["gather", "gathered"]
    assert not journal.of("measured", "export", "end_step")


def test_the_held_out_loss_is_of_trained_tokens_and_counts_a_document_of_two_ranks_once():
    """A logprob stands at its own token; the first has none, whatever its mask says."""
    rows = [row(3, prompt=0, response=4, mask=[1, 0, 1, 1]), row(4, mask=[0, 0, 1, 0, 0])]
    logprobs = [np.array([np.nan, -9.0, -1.0, -2.0]), np.array([np.nan, -9, -4.0, -9, -9])]

    class Scorer:
        def forward_logprobs(self, trajectories, micro_batches):
            assert micro_batches == [[1], [0]]
            return logprobs

    class World:
        def allgather(self, mine):
            assert mine == {3: (3.0, 2), 4: (4.0, 1)}
            return [mine, mine, {8: (2.0, 2)}]  # a replica has two ranks

    measured = heldout_loss(World(), Scorer(), RankBatch(rows, [[1], [0]]))
    assert measured == HeldoutLoss(math.fsum([3, 4, 2]) / 5, 5)


def document(line, size, trained):
    mask = np.array([0] * (size - trained) + [1] * trained, np.uint8)
    return Document(line, np.arange(size, dtype=np.int32) + 10 * line, mask, False)


def test_documents_are_dealt_with_each_micro_batch_naming_rows_of_its_own_share():
    documents = [document(line, size, 2) for line, size in ((5, 4), (2, 9), (9, 5), (7, 6))]
    shares = deal(config(data_parallel=2).actor, documents)
    assert sorted(row.guid for share in shares for row in share.rows) == [2, 5, 7, 9]
    for share in shares:
        assert sorted(n for rows in share.micro_batches for n in rows) == [*range(len(share.rows))]
        for rows in share.micro_batches:
            assert sum(len(share.rows[n].token_ids) for n in rows) <= 12
