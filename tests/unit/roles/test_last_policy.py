"""A trainer that is done stays for engines until the last policy has been evaluated."""

from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal, config

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.roles.actor import loop, rank0
from relax_hpc.roles.rollout.heldout import Due, HeldoutRow, ScoreBoard, TaskScore
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.timers import Timers

STEPS = config().schedule.num_steps
ROW = HeldoutRow(0, 0, 1.0, {}, 3, 3, "stop", 1, ["a"])


class Engines:
    """Some come at the given looks; at each look something may happen first."""

    def __init__(self, *, newcomers=(), at_look=None):
        self.looks, self.newcomers, self.at_look = 0, newcomers, at_look or {}

    def has_newcomers(self):
        self.looks += 1
        self.at_look.get(self.looks, lambda: None)()
        return self.looks in self.newcomers


class Duties:
    def __init__(self, journal):
        self.journal = journal

    def publish(self, version, tensors):
        self.journal.note("publish", version)
        return False


class Trainer:
    step = 3

    def stream_weights(self):
        return iter(())


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes by sleeping alone."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(rank0, "time", clock)
    return clock


def evaluated(paths, rank, *, name="heldout", when="after", number=STEPS):
    board, due = ScoreBoard(paths, rank, 2), Due(name, when, number)
    board.begin(due)
    board.keep(due, [ROW])
    board.add(due, TaskScore.of([ROW]), [ROW])


def served(paths, engines, **settings):
    made = config(engines__rollout__count=2, **settings)
    journal = Journal()
    last = rank0.LastPolicy(made, paths, engines)
    loop.serve(SoloWorld(), Trainer(), Duties(journal), last.wait_for_wanted)
    return journal


def test_engines_that_come_after_the_last_step_are_given_its_weights_until_all_have_evaluated(
    tmp_path,
):
    paths = RunPaths(tmp_path)
    evaluated(paths, 1, when="before")
    evaluated(paths, 1, number=STEPS - 1)  # the last policy before the run was given more steps
    done = {2: lambda: evaluated(paths, 0), 7: lambda: evaluated(paths, 1)}
    engines = Engines(newcomers=(1, 4), at_look=done)
    assert served(paths, engines) == [("publish", 3), ("publish", 3)]
    assert engines.looks == 7
    assert served(paths, Engines(newcomers=(1,))) == []  # a later start finds it done


@pytest.mark.parametrize("due", [Due("heldout", "after", STEPS), Due("heldout", "during", 3)])
def test_who_scores_nothing_for_long_is_named_and_who_does_is_waited_for(tmp_path, due):
    """An evaluation that began before the last step comes first, with few places in engines."""
    paths = RunPaths(tmp_path)
    evaluated(paths, 0)
    board = ScoreBoard(paths, 1, 2)
    board.begin(due)
    slow = {look: lambda: board.keep(due, [ROW]) for look in range(1, 60)}
    if due.when == "during":
        slow[60] = lambda: board.add(due, TaskScore.of([ROW]), [ROW])
    engines = Engines(at_look=slow)
    with pytest.raises(PeerTimeoutError, match=r"policy: rollout-1 scored no held-out"):
        served(paths, engines, launch__advanced__peer_timeout_s=20)
    # one every two seconds, and one a turn
    assert len(slow) + 10 <= engines.looks <= len(slow) + 13


def test_no_batch_is_taken_while_a_policy_is_evaluated_that_training_waits_for(tmp_path):
    """Of policy 4; an engine that comes meanwhile is given it, and then the wait goes on."""
    table = {"path": "p", "every": 4, "advanced": {"one_policy": True}}
    made = config(engines__rollout__count=2, eval={"h": table}, run_root=str(tmp_path), name="r",
                  schedule__num_steps=12)  # fmt: skip
    paths, journal = RunPaths(tmp_path / "r"), Journal()
    for rank in range(2):
        evaluated(paths, rank, name="h", when="before", number=0)
    done = {2: lambda: evaluated(paths, 0, name="h", when="during", number=1),
            5: lambda: evaluated(paths, 1, name="h", when="during", number=1)}  # fmt: skip
    engines = Engines(newcomers=(3,), at_look=done)
    engines.take_ended_loads = list

    def next_portion(step, **settings):
        journal.note(step, engines.looks)
        raise rank0._Interrupted

    sequencer = SimpleNamespace(next_portion=next_portion)
    actor = rank0.ActorRank0(made, sequencer, None, engines, [], Events())
    for step in (1, 4, 5, 5, 6, 12):
        assert actor.next_task(step, Timers(step)) is None
    assert journal == [(1, 0), (4, 0), (5, 5), (6, 5), (12, 5)]


@pytest.mark.parametrize("settings", [
    {"eval": {}}, {"launch__layout": "separate", "weights__transport": "files"},
])  # fmt: skip
def test_nobody_is_waited_for_without_held_out_sets_or_where_rollout_is_a_job_of_its_own(
    tmp_path, settings
):
    engines = Engines(newcomers=(1,))
    assert served(RunPaths(tmp_path), engines, **settings) == []
    assert engines.looks == 0
