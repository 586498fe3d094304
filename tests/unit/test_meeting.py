"""Invitations into a weight group: by MPI, by files, by HTTP; who stays away or comes again."""

import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing

import pytest

from relax_hpc.errors import EngineError
from relax_hpc.inference.members import Member
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.attendant import Attendant
from relax_hpc.weights.meeting.files import FilesCarrier
from relax_hpc.weights.meeting.http import HttpCarrier
from relax_hpc.weights.meeting.invitation import Invitation, invite
from relax_hpc.weights.meeting.mpi import MpiCarrier

SECRET = RunSecret(b"s" * 32)


class Engine:
    """Joins at once, or says why not."""

    def __init__(self, error=None):
        self.joined, self.error = [], error

    def init_weights_group(self, *asked):
        if self.error:
            raise self.error
        self.joined.append(asked)


def member(name, task=""):
    return Member(name, f"9.0-1-{name[-1]}", "http://x", 2, "sglang", "HEALTHY", task=task)


def asked(engines, group="g"):
    return {
        each: Invitation(
            each.id, each.task, each.start, group, "host", 7, 9, 1 + 2 * at, 2, "gloo", "d", 3
        )
        for at, each in enumerate(engines)
    }


@pytest.fixture
def site(tmp_path):
    """A run directory, threads, and tasks that attend; all end with the test."""
    paths = RunPaths(tmp_path)
    paths.control.mkdir()
    with ThreadPoolExecutor(16) as threads, ExitStack() as ends:

        class Site:
            def attend(self, task, engines, way="mpi", secret=SECRET):
                by_start = {each.start: engine for each, engine in engines.items()}

                def client(_, start):
                    if start not in by_start:
                        raise EngineError(f"start {start} is over")
                    return by_start[start]

                ends.enter_context(Attendant(paths, task, secret, way, client))

            def carrier(self):
                return ends.enter_context(closing(MpiCarrier(paths, SECRET)))

        site = Site()
        site.paths, site.threads = paths, threads
        yield site


def outcomes(joins):
    wait(joins.values(), timeout=20)
    return {each.id: str(join.exception(timeout=0) or "") for each, join in joins.items()}


@pytest.mark.parametrize("way", ["mpi", "files"])
def test_each_task_has_its_own_engines_join_and_says_who_did_not(site, way):
    a, b, c = member("e-1", "t-0/9.0-1"), member("e-2", "t-0/9.0-1"), member("e-3", "t-1/9.0-1")
    engines = {a: Engine(), b: Engine(EngineError("no room")), c: Engine()}
    site.attend("t-0/9.0-1", {a: engines[a], b: engines[b]}, way)
    site.attend("t-1/9.0-1", {}, way)  # c's start is over there
    carrier = site.carrier() if way == "mpi" else FilesCarrier(site.paths, site.threads, 20)
    joins, ways = invite([carrier, HttpCarrier(site.threads)], engines, asked(engines), 20)
    assert outcomes(joins) == {"e-1": "", "e-2": "no room", "e-3": "start 9.0-1-3 is over"}
    assert set(ways.values()) == {way}
    assert engines[a].joined == [("host", 7, 1, 9, "g", "gloo")]
    assert engines[c].joined == []
    again, _ = invite([carrier], {a: engines[a]}, asked({a: 0}, "g2"), 20)
    assert outcomes(again) == {"e-1": ""}
    assert [each[4] for each in engines[a].joined] == ["g", "g2"]


def test_who_does_not_come_by_mpi_is_invited_by_http(site):
    comes, stays, never = member("e-1", "t-0/1"), member("e-2"), member("e-3", "t-gone/1")
    engines = {each: Engine() for each in (comes, stays, never)}
    site.attend("t-0/1", {comes: engines[comes]})
    carriers = [site.carrier(), HttpCarrier(site.threads)]
    joins, ways = invite(carriers, engines, asked(engines), 20)
    assert outcomes(joins) == dict.fromkeys(("e-1", "e-2", "e-3"), "")
    assert ways == {"e-1": "mpi", "e-2": "http", "e-3": "http"}
    assert all(len(engine.joined) == 1 for engine in engines.values())


def test_a_task_comes_to_the_next_trainer_and_one_without_the_secret_is_not_let_in(site):
    own, other = member("e-1", "t-0/1"), member("e-2", "t-1/1")
    engines = {own: Engine(), other: Engine()}
    site.attend("t-0/1", {own: engines[own]})
    site.attend("t-1/1", {other: engines[other]}, secret=RunSecret(b"x" * 32))
    for number in (1, 2):
        carrier = site.carrier()
        begin = time.monotonic()
        assert carrier.reaches({own: engines[own]}, 20) == [own]
        assert time.monotonic() - begin < 10
        assert carrier.reaches(engines, 4) == [own]
        assert outcomes(carrier.invite(engines, asked({own: 0}, f"g{number}"))) == {"e-1": ""}
        carrier.close()
    assert [each[4] for each in engines[own].joined] == ["g1", "g2"]


def test_a_task_that_is_not_let_in_says_whose_library_differs(site, caplog):
    own = member("e-1", "t-0/1")
    site.attend("t-0/1", {own: Engine()}, secret=RunSecret(b"x" * 32))
    carrier = site.carrier()
    carrier.reaches({}, 1)
    carrier._door.accept([])
    carrier._door.library = "MPICH Version: 5.0.2"
    assert carrier.reaches({own: Engine()}, 4) == []
    assert re.search(
        r"did not let this task in: .*; the trainer has MPICH Version: 5.0.2, this task MPICH "
        r"Version: \S+: install one for both",
        caplog.text,
    )


def test_without_mpich_everybody_is_invited_by_http(site, monkeypatch):
    monkeypatch.setattr("relax_hpc.runtime.comm.mpi_door.find_launcher", lambda: None)
    engines = {member("e-1", "t-0/1"): Engine()}
    carrier = site.carrier()
    joins, ways = invite([carrier, HttpCarrier(site.threads)], engines, asked(engines), 20)
    assert outcomes(joins) == {"e-1": ""}
    assert ways == {"e-1": f"http ({carrier.problem})"}
    assert carrier.problem.startswith("MPICH is not installed")
