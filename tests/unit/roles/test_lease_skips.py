"""Who has the lease on shared GPUs; which samples a skipped update is put down to."""

from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal

from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor import lease
from relax_hpc.roles.actor.lease import SharedGpus
from relax_hpc.roles.training.duties import (
    fields_of,
    line_of,
    stop_if_stuck,
)


class World:
    def __init__(self, journal):
        self.journal = journal

    def barrier(self):
        self.journal.note("barrier")

    def bcast(self, value):
        self.journal.note("told")
        return value


class Engines:
    def __init__(self, journal):
        self.journal = journal

    def fall_asleep(self, *, notice_s=0.0, on_wait):
        self.journal.note("asleep", notice_s)

    def wake(self):
        self.journal.note("wake")

    def close(self):
        self.journal.note("closed")


class Borrower:
    def __init__(self, journal):
        self.journal = journal

    def lend(self):
        self.journal.note("lend")

    def reclaim(self):
        self.journal.note("reclaim")


def test_the_trainer_takes_memory_when_engines_sleep_on_every_rank_and_they_wake_when_all_gave_it():
    journal, events = Journal(), Events()
    taken = SharedGpus(World(journal), Engines(journal), events)
    trainer = Borrower(journal)
    assert journal == [("asleep", lease.NOTICE_S), ("told",)]
    journal.clear()
    taken.to_trainer(trainer)  # it has it already
    assert journal == []
    taken.to_engines(trainer)
    assert journal == [("lend",), ("barrier",), ("wake",)]
    journal.clear()
    taken.to_trainer(trainer)
    assert journal == [("asleep", 0.0), ("told",), ("reclaim",)]
    taken.to_trainer(trainer)
    assert len(journal) == 3
    assert [event["holder"] for event in events.of("lease")] == ["trainer", "engines", "trainer"]


@pytest.mark.parametrize(("left", "is_doubted"), [(27.0, False), (26.9, True)])
def test_a_trainer_that_leaves_less_than_engines_gave_back_is_told_of(
    monkeypatch, caplog, left, is_doubted
):
    free = iter([5.0, 5.0, 5.0])  # nobody has started yet, and gives nothing back
    monkeypatch.setattr(lease, "free_gib", lambda: next(free))
    taken = SharedGpus(World(Journal()), Engines(Journal()), Events())
    for readings, said in (
        ([31.9, 31.9], False),
        ([1.5, 28.5, 28.5], False),  # asleep: of this GPU they gave back 27
        ([left, left], is_doubted),
    ):
        free = iter(readings)
        caplog.clear()
        if len(readings) == 3:
            taken.to_trainer(Borrower(Journal()))
        else:
            taken.to_engines(Borrower(Journal()))
        assert not list(free)
        assert ("gave back 27.0 GiB" in caplog.text) == said
    assert not is_doubted or "leaves 26.9 of it" in caplog.text


def test_a_rank_without_engines_waits_for_rank_0():
    journal, events = Journal(), Events()
    taken = SharedGpus(World(journal), None, events)
    taken.to_engines(Borrower(journal))
    taken.to_trainer(Borrower(journal))
    taken.close()
    assert journal == [("told",), ("lend",), ("barrier",), ("told",), ("reclaim",)]
    assert events.all == []


class Sample(SimpleNamespace):
    def _asdict(self):
        return dict(self.__dict__)


SAMPLES = [Sample(guid=4, sibling=1, what="loss"), Sample(guid=6, sibling=0, what="gradient")]
SKIP = SimpleNamespace(
    reason="loss is nan", samples=SAMPLES, num_samples=5, in_a_row=2, is_model=False
)
PLACES = {4: "bus/x.h5"}


def test_a_skipped_update_names_its_samples_and_where_they_are():
    assert fields_of(SKIP, PLACES) == {
        "reason": "loss is nan", "in_a_row": 2, "num_samples": 5,
        "samples": [
            {"guid": 4, "sibling": 1, "what": "loss", "shard": "bus/x.h5"},
            {"guid": 6, "sibling": 0, "what": "gradient", "shard": None},
        ],
    }  # fmt: skip
    assert line_of(SKIP, PLACES) == (
        "loss is nan: guid/sibling 4/1 (loss) in bus/x.h5, 6/0 (gradient) and 3 more"
    )
    all_named = SimpleNamespace(**{**SKIP.__dict__, "num_samples": 2})
    assert line_of(all_named, {}) == "loss is nan: guid/sibling 4/1 (loss), 6/0 (gradient)"
    nobody = SimpleNamespace(**{**SKIP.__dict__, "samples": []})
    assert "the model's own gradient" in line_of(nobody, PLACES)


def test_a_run_ends_when_three_updates_in_a_row_were_skipped():
    stop_if_stuck(SKIP)
    third = SimpleNamespace(**{**SKIP.__dict__, "in_a_row": 3})
    with pytest.raises(TrainingError, match=r"3 updates in a row .*4/1 \(loss\), 6/0"):
        stop_if_stuck(third)
    broken = SimpleNamespace(**{**SKIP.__dict__, "is_model": True, "in_a_row": 1})
    with pytest.raises(TrainingError, match="loss is nan: the model gives none"):
        stop_if_stuck(broken)
