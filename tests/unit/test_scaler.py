"""Requests to scale and what becomes of them: the real scaler and verbs, steps that only sleep."""

import subprocess

import pytest
from job_trees import job_of

from relax_hpc.errors import ConfigError
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.runs.scale import requests as scale
from relax_hpc.runs.scale import scaler
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId


class House:
    """A run with one engine of its own and room for three, and the hands of those around it."""

    def __init__(self, folder):
        self.nodes, self.processes, self.version = ["n2", "n3", "n4"], {}, 7
        self.config = job_of(
            run_root=str(folder), launch__max_restarts=1,
            engines__rollout={"advanced": {"start_timeout_s": 60}, "resources": {"max_nodes": 4}},
        )  # fmt: skip
        self.paths = RunPaths(self.config.run_dir)
        write_json(self.paths.config, self.config.model_dump(mode="json"))
        self.roster = Roster(self.version)
        self.roster.write(self.paths)

    def scaler(self, attempt="1.0"):
        return scaler.Scaler(self.config, self.paths, self, attempt)

    def start(self, extra):
        self.processes[extra.id] = process = subprocess.Popen(["sleep", "600"])
        return ProcessId.of(process.pid)

    def end(self, extra):
        self.kill(extra.id)

    def last_words(self, extra):
        return "killed"

    def kill(self, *ids):
        for member in ids:
            self.processes[member].kill()
            self.processes[member].wait()

    def announce(self, member, state="HEALTHY", reason=""):
        members.announce(self.paths, Member(member, "e1", "", 1, "embedded", state, reason))

    def hold(self, member, start="e1", version=None, state="ACTIVE"):
        entry = RosterEntry(start, self.version if version is None else version, state)
        self.roster.members[member] = entry
        self.roster.write(self.paths)

    def obey(self):
        """Owners that were told to drain say so, stop their engine and end."""
        for member, process in self.processes.items():
            if self.paths.drain(member).exists() and process.poll() is None:
                self.announce(member, "GONE")
                self.kill(member)

    def grown(self, engines, *ids):
        """A scaler that was asked for so many engines, of which these are up; and the request."""
        running = self.scaler()
        request = out(self, engines).request
        running.tick()
        if ids:
            self.up(running, *ids)
        return running, request

    def up(self, running, *ids):
        """Takes engines from STARTING to ACTIVE."""
        for member in ids:
            self.announce(member)
            self.hold(member)
        running.tick()

    @property
    def state(self):
        return ScaleState.read(self.paths)

    @property
    def states(self):
        return {extra.id: extra.state for extra in self.state.extras.values()}

    def outcome(self, request):
        found = self.state.requests[request.id]
        return found.state, found.reason

    def alive(self):
        return {member for member, process in self.processes.items() if process.poll() is None}


@pytest.fixture
def house(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_hpc.runs.status.job_state", lambda _: "RUNNING")
    house = House(tmp_path)
    yield house
    house.kill(*house.processes)


def out(house, engines):
    return scale.out(house.paths.root, engines)


def scale_in(house, engines=None, member=None, drain_s=9.0):
    return scale.scale_in(house.paths.root, engines=engines, member=member, drain_s=drain_s)


def test_a_newcomer_is_active_only_when_that_start_of_it_holds_the_newest_weights(house):
    running, request = house.grown(2)
    assert house.states == {"extra-1": "STARTING"} and house.state.extras["extra-1"].node == "n2"
    assert members.extras(house.paths) == ["extra-1"], "the trainer knows whom to look for"
    seen = []
    for announce in (
        lambda: house.announce("extra-1", "STARTING"),
        lambda: house.announce("extra-1"),
        lambda: house.hold("extra-1", version=None, state="SYNCING"),
        lambda: house.hold("extra-1", start="e0"),
        lambda: house.hold("extra-1", version=house.version - 1),
        lambda: house.hold("extra-1"),
    ):
        announce()
        running.tick()
        seen.append(house.states["extra-1"])
        assert (house.outcome(request)[0] == "DONE") == (seen[-1] == "ACTIVE")
    assert seen == ["STARTING", "HEALTHY", "SYNCING", "HEALTHY", "HEALTHY", "ACTIVE"]


def test_asking_again_changes_nothing(house):
    running = house.scaler()
    first = out(house, 3)
    assert out(house, 3).request == first.request and out(house, 3).repeated
    running.tick()
    assert out(house, 3).repeated and sorted(house.alive()) == ["extra-1", "extra-2"]
    house.up(running, "extra-1", "extra-2")
    assert out(house, 3).request is None and out(house, 2).request is None
    gone = scale_in(house, 2)
    running.tick()
    assert scale_in(house, 2).request == gone.request
    house.obey()
    running.tick()
    running.tick()
    assert scale_in(house, 2).request is None and scale_in(house, member="extra-2").request is None


def test_removing_another_engine_is_another_wish(house):
    running, _ = house.grown(3, "extra-1", "extra-2")
    first = scale_in(house, member="extra-1", drain_s=9)
    running.tick()
    assert scale_in(house, member="extra-1").request == first.request
    with pytest.raises(ConfigError, match=r"without extra-1\) is under way"):
        scale_in(house, member="extra-2")


def test_the_place_of_an_engine_is_free_when_it_has_ended_and_not_when_it_is_told_to():
    leaving = Extra("extra-1", 1, "n1", 0, "DRAINING", 0.0, ending="FAILED")
    gone = Extra("extra-2", 1, "n1", 1, "GONE", 0.0, ending="GONE")
    state = ScaleState("1.0", 3, ["n1", "n2"], 2, extras={"extra-1": leaving, "extra-2": gone})
    assert state.free == [("n1", 1), ("n2", 0), ("n2", 1)]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda h: scale.out(h.paths.root, 2, "file"), "--transport file: unknown; it is one of"),
        (lambda h: out(h, 5), "no idle node for 4 more engines: rollout holds 4 nodes, 1 used by"),
        (lambda h: scale_in(h, member="rollout-0"), "is one that the run started with"),
        (lambda h: scale_in(h, member="extra-7"), "no such engine; added engines: none"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_starts(house, ask, message):
    running = house.scaler()
    with pytest.raises(ConfigError) as error:
        ask(house)
    assert message in str(error.value) and "\n" not in str(error.value)
    running.tick()
    assert house.processes == {} and not list(house.paths.scale.glob("request-*"))


def test_scaling_in_as_the_run_ends_tells_what_is_left_or_that_it_has_ended(house, monkeypatch):
    running, _ = house.grown(2, "extra-1")
    running.end(timeout_s=0.2)
    assert not house.alive() and house.states == {"extra-1": "GONE"}
    assert scale_in(house, 1).engines == 1, "the added one ended with the run"
    states = iter(["RUNNING", "COMPLETED"])
    monkeypatch.setattr("relax_hpc.runs.status.job_state", lambda _: next(states))
    with pytest.raises(ConfigError, match="is completed; only a run that is running is scaled"):
        scale_in(house, 1)


def test_a_start_that_fails_is_undone_with_all_that_came_up_for_it_and_says_why(house):
    running, request = house.grown(3, "extra-1")
    house.announce("extra-2", "FAILED", "out of memory")
    house.kill("extra-2")
    running.tick()
    assert house.states == {"extra-1": "DRAINING", "extra-2": "FAILED"}
    assert house.outcome(request)[0] == "PENDING", "not before nothing is left"
    house.obey()
    running.tick()
    assert house.outcome(request) == ("FAILED", "extra-2: out of memory")
    assert house.states == {"extra-1": "CANCELLED", "extra-2": "FAILED"}
    assert not house.alive() and house.state.engines == 1 and members.extras(house.paths) == []
    out(house, 2)  # another try is another request
    running.tick()
    assert house.alive() == {"extra-3"}


def test_an_engine_that_is_late_is_ended_and_then_its_step_from_outside(house, monkeypatch):
    monkeypatch.setattr(scaler, "START_MARGIN_S", -61)
    monkeypatch.setattr(scaler, "END_MARGIN_S", -1)
    running = house.scaler()
    request = out(house, 2).request
    for _ in range(4):  # started; too late; told to end, ended from outside; settled
        running.tick()
    why = "extra-1: its engine was not healthy within -1 s"
    assert house.outcome(request) == ("FAILED", why) and not house.alive()


def test_cancelling_takes_back_what_was_started(house):
    running, request = house.grown(3, "extra-1")
    assert scale.cancel(house.paths.root) == scale.cancel(house.paths.root) == request
    running.tick()
    house.obey()
    running.tick()
    assert house.outcome(request) == ("CANCELLED", "")
    assert set(house.states.values()) == {"CANCELLED"} and not house.alive()
    assert house.state.engines == 1


def test_removed_are_those_that_came_last_and_they_drain_first(house):
    running, _ = house.grown(4, "extra-1", "extra-2", "extra-3")
    request = scale_in(house, 3, drain_s=9).request
    running.tick()
    assert house.states == {"extra-1": "ACTIVE", "extra-2": "ACTIVE", "extra-3": "DRAINING"}
    assert house.alive() == {"extra-1", "extra-2", "extra-3"}
    with pytest.raises(ConfigError, match="engines that drain do not come back"):
        scale.cancel(house.paths.root)
    house.obey()
    running.tick()
    assert house.states["extra-3"] == "GONE" and house.outcome(request) == ("DONE", "")
    scale_in(house, member="extra-1")
    running.tick()
    house.obey()
    running.tick()
    assert house.alive() == {"extra-2"} and house.state.engines == 2
    out(house, 3)  # into the place that became free
    running.tick()
    assert house.state.extras["extra-4"].node == "n2"


def test_an_engine_that_does_not_end_after_its_drain_is_ended_from_outside(house):
    running, _ = house.grown(2, "extra-1")
    request = scale_in(house, 1, drain_s=-60).request
    for _ in range(3):
        running.tick()
    assert not house.alive() and house.outcome(request)[0] == "DONE"


def test_a_scaler_that_is_started_again_finds_its_steps_running(house):
    _, request = house.grown(2)
    again = house.scaler()
    again.tick()
    assert house.alive() == {"extra-1"} and house.states == {"extra-1": "STARTING"}
    house.up(again, "extra-1")
    assert house.outcome(request) == ("DONE", "")


def test_after_a_requeue_there_are_as_many_engines_as_before(house):
    house.grown(3, "extra-1", "extra-2")
    house.kill("extra-1", "extra-2")  # with the job
    again = house.scaler("1.1")
    again.tick()
    assert house.alive() == {"extra-3", "extra-4"} and house.state.engines == 3
    assert house.states["extra-1"] == "GONE"


def test_an_engine_that_is_lost_in_service_is_replaced_as_often_as_a_step_is_restarted(house):
    running, _ = house.grown(2, "extra-1")
    house.kill("extra-1")
    running.tick()
    assert house.states == {"extra-1": "FAILED", "extra-2": "STARTING"}
    assert house.state.extras["extra-1"].reason == "killed"
    house.up(running, "extra-2")
    house.kill("extra-2")
    running.tick()
    running.tick()
    assert house.alive() == set() and house.state.engines == 1
