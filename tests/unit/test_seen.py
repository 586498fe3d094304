"""Records that are followed cost no names while nothing happens, and no change is missed."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from job_trees import job_of

from relax_hpc.inference import members
from relax_hpc.inference.members import EngineRegistry, Member, Roster, RosterEntry
from relax_hpc.roles.ending import Ending
from relax_hpc.runs.boards import follower
from relax_hpc.runs.scale.records import ScaleRequest, ScaleState
from relax_hpc.runs.scale.scaler import Scaler
from relax_hpc.runtime.files import records
from relax_hpc.runtime.files.records import read_json, write_json, write_json_once
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId
from relax_hpc.runtime.telemetry.events import EventTail
from relax_hpc.weights import publish

_asked: list[str] = []
sys.addaudithook(
    lambda name, args: (
        _asked.append(str(args[0])) if name in ("open", "os.scandir", "os.listdir") else None
    )
)


@contextmanager
def counted(root):
    """Fills a list with the names below `root` that are opened, listed or looked up meanwhile."""
    found: list[str] = []
    begun, stat = len(_asked), os.stat

    def noted(path, *args, **kwargs):
        _asked.append(str(path))
        return stat(path, *args, **kwargs)

    os.stat = noted
    try:
        yield found
    finally:
        os.stat = stat
    found += [name for name in _asked[begun:] if name.startswith(str(root))]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def paths(tmp_path):
    found = RunPaths(tmp_path / "run")
    for folder in (found.members, found.control, found.extras.parent):
        folder.mkdir(parents=True)
    return found


def follow(folder):
    return records.RecordCache(folder, lambda name: read_json(folder / name))


def test_a_record_is_read_again_when_it_was_replaced_made_or_removed_and_not_otherwise(
    tmp_path, clock
):
    followed = follow(tmp_path)
    write_json(tmp_path / "a", 1)
    assert followed.get("a", "b") == [1, None]
    clock[0] += records.GRAIN_S
    assert followed.get("a", "b") == [1, None]
    with counted(tmp_path) as opened:
        for _ in range(7):
            clock[0] += 1.0
            assert followed.get("a", "b") == [1, None]
    assert opened == []
    for change, found in (
        (lambda: write_json(tmp_path / "a", 2), [2, None]),
        (lambda: write_json(tmp_path / "b", 3), [2, 3]),
        (lambda: (tmp_path / "a").unlink(), [None, 3]),
    ):
        time.sleep(0.02)  # the clock of the file system ticks
        change()
        assert followed.get("a", "b") == found


def test_changes_that_one_tick_of_a_clock_hides_are_seen_soon_after(tmp_path, clock, monkeypatch):
    followed = follow(tmp_path)
    write_json(tmp_path / "a", 1)
    assert followed.get("a") == [1]
    before = tmp_path.stat()
    write_json(tmp_path / "a", 2)
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(records, "_read_stamp", lambda fd: (before.st_mtime_ns,))
    clock[0] += records.GRAIN_S + 0.1
    assert followed.get("a") == [2]


def test_a_folder_that_never_tells_is_read_now_and_then_and_one_that_comes_is_seen(
    tmp_path, clock, monkeypatch
):
    followed = follow(tmp_path)
    monkeypatch.setattr(records, "_read_stamp", lambda fd: (0,))
    write_json(tmp_path / "a", 1)
    assert followed.get("a") == [1]
    clock[0] += records.GRAIN_S
    followed.get("a")
    write_json(tmp_path / "a", 2)
    clock[0] += records.REFRESH_S - 1
    assert followed.get("a") == [1]
    clock[0] += 1
    assert followed.get("a") == [2]
    monkeypatch.undo()
    late = follow(tmp_path / "late")
    assert late.get("a") == [None]
    with counted(tmp_path) as opened:
        assert [late.get("a") for _ in range(9)] == [[None]] * 9
    assert opened == []
    time.sleep(0.02)
    (tmp_path / "late").mkdir()
    write_json(tmp_path / "late" / "a", 3)
    assert late.get("a") == [3]


def test_a_folder_that_another_makes_while_it_is_looked_for_is_followed(
    tmp_path, clock, monkeypatch
):
    """Its parent's stamp is of after that, so the parent would not tell of it."""
    folder, real, to_come = tmp_path / "late", records._read_stamp, [True]

    def changed_at(fd):
        if to_come:
            to_come.pop()
            folder.mkdir()
            write_json(folder / "a", 1)
        return real(fd)

    monkeypatch.setattr(records, "_read_stamp", changed_at)
    followed = follow(folder)
    assert followed.get("a") == [1]
    clock[0] += records.GRAIN_S
    followed.get("a")
    for value in (2, 3):
        time.sleep(0.02)
        write_json(folder / "a", value)
        assert followed.get("a") == [value]


def board_of(paths, num_tasks, clock):
    """A second's looks of a follower of the events of so many tasks and the trainer."""
    paths.events_folder.mkdir()
    for rank in range(num_tasks):
        paths.events("rollout", rank).write_text('{"event": "start", "time": 1}\n')
    paths.events("actor", 0).write_text('{"event": "start", "time": 1}\n')
    tail, due = EventTail(paths.events_folder), [0.0]
    assert len(tail.read()) == num_tasks + 1

    def second():
        if clock[0] >= due[0]:
            assert tail.read() == []
            due[0] = clock[0] + follower.pause_s(tail.num_files)

    return second


class Steps:
    """Steps of added engines that are there at once."""

    nodes = ("n2", "n3")

    def start(self, extra):
        return ProcessId.of(os.getpid())


def scaler_of(paths):
    """A second's looks of the scaler of a run with two added engines."""
    job = job_of(engines__rollout__resources__max_nodes=3)
    found = Scaler(job, paths, Steps(), "7.0")
    write_json_once(
        paths.scale_request(1), asdict(ScaleRequest(1, "out", 3, None, 0.0, time.time()))
    )
    found.tick()
    for extra in ("extra-1", "extra-2"):
        members.announce(paths, Member(extra, "s", "http://x", 1, "embedded", "HEALTHY"))
    entries = Roster.read(paths).members
    entries |= {extra: RosterEntry("s", 1, "ACTIVE") for extra in ("extra-1", "extra-2")}
    Roster(1, entries).write(paths)
    found.tick()
    assert ScaleState.read(paths).requests[1].state == "DONE"

    def second():
        found.tick()
        found.tick()

    return second


def looks(paths, num_engines, per_task):
    """A second's looks of a trainer and of the tasks of so many engines, as they are at rest."""
    ids = [f"rollout-{i}" for i in range(num_engines)]
    entries = {name: RosterEntry("s", 1, "ACTIVE") for name in ids}
    Roster(1, entries).write(paths)
    for name in ids:
        members.announce(paths, Member(name, "s", "http://x", 1, "embedded", "HEALTHY"))
    members.announce_extras(paths, [])
    extras = members.follow_extras(paths)
    register = EngineRegistry(paths, lambda: [*ids, *extras()], lambda member: None)
    tasks = [ids[at : at + per_task] for at in range(0, num_engines, per_task)]
    # Each task is a process of its own: what it shares is its own.
    shared = [records.RecordCache(paths.control, lambda _: Roster.read(paths)) for _ in tasks]
    followed = [members.follow(paths) for _ in tasks]
    endings = [Ending(paths, "7.0") for _ in [*tasks, "the trainer"]]

    def second():
        assert len(register.list_healthy()) == num_engines + len(extras())
        for ending in endings:
            ending._looked = -1e9
            assert not ending.is_near()
        for task, held, known in zip(tasks, shared, followed, strict=True):
            for _ in [*task, "the client"]:
                held.get("")
            assert len(known.get(*task)) == len(task)

    return second


@pytest.mark.parametrize(("num_engines", "per_task"), [(1, 1), (64, 8), (64, 1)])
def test_a_run_at_rest_costs_less_than_five_names_a_second(paths, clock, num_engines, per_task):
    """Tasks, trainer, scaler and the follower of the boards together, each a process."""
    parts = {
        "tasks and trainer": looks(paths, num_engines, per_task),
        "scaler": scaler_of(paths),
        "board": board_of(paths, num_engines // per_task, clock),
    }
    rates, seconds = dict.fromkeys(parts, 0.0), 240
    for number in range(-3, seconds):
        clock[0] += records.GRAIN_S if number < 0 else 1.0
        if number == -2:
            for folder in (paths.control, paths.members, paths.scale):
                write_json(folder / "of-another-process.json", {})
        for name, second in parts.items():
            with counted(paths.root) as asked:
                second()
            rates[name] += len(asked) / seconds if number >= 0 else 0.0
    assert sum(rates.values()) <= 5.0
    assert all(rates.values()), "all is read now and then"


def test_a_folder_that_has_told_of_others_changes_is_trusted_for_longer(tmp_path, clock):
    followed = follow(tmp_path)
    write_json(tmp_path / "a", 1)
    records.folder_at(tmp_path).note()
    assert followed.get("a") == [1]
    clock[0] += records.GRAIN_S
    followed.get("a")

    def reads(seconds):
        with counted(tmp_path) as opened:
            for _ in range(seconds):
                clock[0] += 1.0
                followed.get("a")
        return len(opened)

    assert reads(240) == 240 / records.REFRESH_S
    time.sleep(0.02)
    write_json(tmp_path / "a", 2)
    assert followed.get("a") == [2]
    clock[0] += records.GRAIN_S
    followed.get("a")
    assert reads(240) == 240 / records.TOLD_S


def test_more_than_a_thousand_engines_may_wait_for_each_other_in_an_update(paths):
    count = 1030
    ids = [f"rollout-{i}" for i in range(count)]
    for name in ids:
        members.announce(paths, Member(name, "s", "http://x", 1, "embedded", "HEALTHY"))
    together = threading.Barrier(count)

    class Engine:
        def health(self, timeout_s):
            together.wait(60)  # as in a collective that all have to join
            return True

    register = EngineRegistry(paths, lambda: ids, lambda member: Engine())
    with ThreadPoolExecutor(publish._THREADS) as threads:
        assert len(register.live(threads)) == count


def test_own_changes_are_not_what_a_folder_has_told_of_others(tmp_path, clock):
    folder = records.Folder(tmp_path)
    for number in range(3):
        folder.count()
        folder.note()
        time.sleep(0.02)  # the clock of the file system ticks
        write_json(tmp_path / "a", number)
        clock[0] += 1.0
        before = folder.count()
    assert not folder.has_told
    time.sleep(0.02)
    write_json(tmp_path / "a", "of somebody else")
    assert folder.count() != before and folder.has_told
