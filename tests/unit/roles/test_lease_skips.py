"""Who has the lease on shared GPUs; which samples a skipped update is put down to."""

from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal

from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor import lease
from relax_hpc.roles.actor.lease import SharedGpus
from relax_hpc.roles.training.skips import fields_of, line_of, stop_if_stuck


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
