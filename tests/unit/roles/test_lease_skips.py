"""The lease on shared GPUs, skipped updates, and ranks that hear from a rank 0 that waits."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal, config

from relax_hpc.errors import TrainingError
from relax_hpc.inference import members
from relax_hpc.inference.members import EngineRegistry, Member
from relax_hpc.roles.actor import lease, loop, rank0
from relax_hpc.roles.actor.lease import SharedGpus
from relax_hpc.roles.rollout.heldout import Due, ScoreBoard
from relax_hpc.roles.training import duties as turns
from relax_hpc.roles.training.duties import (
    fields_of,
    line_of,
    stop_if_stuck,
)
from relax_hpc.runtime.comm.world import connect
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.same_gpu import Sleep


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

    def fall_asleep(self, *, on_wait):
        self.journal.note("asleep")

    def wake(self):
        self.journal.note("wake")


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
    assert journal == [("asleep",), ("told",)]
    journal.clear()
    taken.to_trainer(trainer)  # it has it already
    assert journal == []
    taken.to_engines(trainer)
    assert journal == [("lend",), ("barrier",), ("wake",)]
    journal.clear()
    taken.to_trainer(trainer)
    assert journal == [("asleep",), ("told",), ("reclaim",)]
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
    said = line_of(SKIP, PLACES)
    assert "4/1 (loss) in bus/x.h5, 6/0 (gradient) and 3 more" in said


def test_a_run_ends_when_three_updates_in_a_row_were_skipped():
    stop_if_stuck(SKIP)
    third = SimpleNamespace(**{**SKIP.__dict__, "in_a_row": 3})
    with pytest.raises(TrainingError, match=r"3 updates in a row .*4/1 \(loss\), 6/0"):
        stop_if_stuck(third)
    broken = SimpleNamespace(**{**SKIP.__dict__, "is_model": True, "in_a_row": 1})
    with pytest.raises(TrainingError, match="loss is nan: the model gives none"):
        stop_if_stuck(broken)


SILENCE_S, WAIT_S = 2.0, 3.0
"""The time that ranks wait for each other, and what rank 0 waits for others."""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Calls what is given on both ranks of a world, at once; its results."""
    monkeypatch.setattr(turns, "TURN_S", 0.2)
    secret = RunSecret.new()

    def on_both(call):
        def rank(number):
            return call(
                connect(
                    "files", rank=number, size=2, rendezvous=tmp_path / "ranks", secret=secret,
                    timeout_s=SILENCE_S,
                )
            )  # fmt: skip

        with ThreadPoolExecutor(2) as threads:
            return [each.result() for each in [threads.submit(rank, n) for n in range(2)]]

    return on_both


class Slow:
    """An engine that has requests to hand back for as long as rank 0 waits."""

    def __init__(self):
        self.idle_at = time.monotonic() + WAIT_S

    def num_requests(self):
        return int(time.monotonic() < self.idle_at)

    def abort_all(self): ...
    def shut(self): ...
    def pause(self): ...
    def release_memory(self, tags): ...


@pytest.mark.parametrize("state", ["STARTING", "HEALTHY"])
def test_engines_that_start_or_fall_asleep_on_shared_gpus_are_waited_for_by_all_ranks(
    ranks, tmp_path, state
):
    paths, slow = RunPaths(tmp_path), Slow()

    def announce(state):
        members.announce(paths, Member("rollout-0", "17.0-1-1", "", 1, "embedded", state))

    def lease(world):
        sleep = None
        if world.rank == 0:
            register = EngineRegistry(paths, lambda: ["rollout-0"], lambda _: slow)
            sleep = Sleep(register, "17.0", timeout_s=60, start_timeout_s=60)
        SharedGpus(world, sleep, Events()).close()
        return time.monotonic()

    announce(state)
    with ThreadPoolExecutor(1) as later:
        if state == "STARTING":
            later.submit(lambda: (time.sleep(WAIT_S), announce("WAITING")))
        assert min(ranks(lease)) >= slow.idle_at - 1


def test_the_evaluation_of_the_last_policy_is_waited_for_by_all_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(rank0, "LAST_LOOK_EVERY_S", 0.2)
    paths, settings = RunPaths(tmp_path), config(engines__rollout__count=1)
    board, due = ScoreBoard(paths, 0, 1), Due("heldout", "after", config().schedule.num_steps)
    board.begin(due)
    until = time.monotonic() + WAIT_S
    newcomers = SimpleNamespace(has_newcomers=lambda: False)

    def serve(world):
        last = None
        if world.rank == 0:
            tell = turns.Turns(world).tell
            last = rank0.LastPolicy(settings, paths, newcomers, tell)
            last._owed.look = lambda: time.monotonic() < until
        loop.serve(world, None, None, last and last.wait_for_wanted)
        return time.monotonic()

    assert min(ranks(serve)) >= until
