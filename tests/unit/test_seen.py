"""Records that are followed cost no names while nothing happens, and no change is missed."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_hpc.fleet import members, seen
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.fleet.roster import Roster, RosterEntry
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.roles.ending import Ending

_opened: list[str] = []
sys.addaudithook(lambda name, args: _opened.append(str(args[0])) if name == "open" else None)


@contextmanager
def counted(root):
    """Fills a list with the names below `root` that are opened meanwhile."""
    found: list[str] = []
    begun = len(_opened)
    yield found
    found += [name for name in _opened[begun:] if name.startswith(str(root))]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(seen.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def paths(tmp_path):
    found = RunPaths(tmp_path / "run")
    for folder in (found.members, found.control, found.extras.parent):
        folder.mkdir(parents=True)
    return found


def follow(folder):
    return seen.Seen(folder, lambda name: read_json(folder / name))


def test_a_record_is_read_again_when_it_was_replaced_made_or_removed_and_not_otherwise(
    tmp_path, clock
):
    followed = follow(tmp_path)
    write_json(tmp_path / "a", 1)
    assert followed.get("a", "b") == [1, None]
    clock[0] += seen.GRAIN_S
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


def test_changes_that_one_tick_of_the_servers_clock_hides_are_seen_soon_after(tmp_path, clock):
    followed = follow(tmp_path)
    write_json(tmp_path / "a", 1)
    assert followed.get("a") == [1]
    before = tmp_path.stat()
    write_json(tmp_path / "a", 2)
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hidden = seen._changed_at
    seen._changed_at = lambda fd: (before.st_mtime_ns,)
    try:
        clock[0] += seen.GRAIN_S + 0.1
        assert followed.get("a") == [2]
    finally:
        seen._changed_at = hidden


def test_a_folder_is_let_go_with_its_owner(tmp_path):
    held = Path("/proc/self/fd")
    before = set(held.iterdir())
    folder = seen.Folder(tmp_path)
    folder.count()
    assert set(held.iterdir()) - before
    del folder
    assert set(held.iterdir()) <= before


def test_a_folder_that_never_tells_is_read_now_and_then_and_one_that_comes_is_seen(
    tmp_path, clock, monkeypatch
):
    followed = follow(tmp_path)
    monkeypatch.setattr(seen, "_changed_at", lambda fd: (0,))
    write_json(tmp_path / "a", 1)
    assert followed.get("a") == [1]
    clock[0] += seen.GRAIN_S
    followed.get("a")
    write_json(tmp_path / "a", 2)
    clock[0] += seen.REFRESH_S - 1
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


def looks(paths, num_engines, per_task):
    """A second's looks of a trainer and of the tasks of so many engines, as they are at rest."""
    ids = [f"rollout-{i}" for i in range(num_engines)]
    entries = {name: RosterEntry("s", 1, "ACTIVE") for name in ids}
    Roster(1, entries).write(paths)
    for name in ids:
        members.announce(paths, Member(name, "s", "http://x", 1, "embedded", "HEALTHY"))
    members.announce_extras(paths, [])
    extras = members.follow_extras(paths)
    register = Register(paths, lambda: [*ids, *extras()], lambda member: None)
    tasks = [ids[at : at + per_task] for at in range(0, num_engines, per_task)]
    # Each task is a process of its own: what it shares is its own.
    shared = [seen.Seen(paths.control, lambda _: Roster.read(paths)) for _ in tasks]
    followed = [members.follow(paths) for _ in tasks]
    endings = [Ending(paths, "7.0") for _ in [*tasks, "the trainer"]]

    def second():
        assert len(register.known()) == num_engines
        for ending in endings:
            ending._looked = -1e9
            assert not ending.is_near()
        for task, held, known in zip(tasks, shared, followed, strict=True):
            for _ in [*task, "the client"]:
                held.get("")
            assert len(known.get(*task)) == len(task)

    return second


@pytest.mark.parametrize(("num_engines", "per_task"), [(1, 1), (64, 8)])
def test_engines_at_rest_cost_less_than_five_names_a_second(paths, clock, num_engines, per_task):
    second = looks(paths, num_engines, per_task)
    second()
    clock[0] += seen.GRAIN_S
    second()
    seconds = 300
    with counted(paths.root) as opened:
        for _ in range(seconds):
            clock[0] += 1.0
            second()
    rate = len(opened) / seconds
    print(f"{num_engines} engines: {rate:.2f} names a second")
    assert rate <= 5.0
    assert opened, "all is read now and then"


def test_more_than_a_thousand_engines_may_wait_for_each_other_in_an_update(paths):
    from relax_hpc.weights import publish

    count = 1100
    ids = [f"rollout-{i}" for i in range(count)]
    for name in ids:
        members.announce(paths, Member(name, "s", "http://x", 1, "embedded", "HEALTHY"))
    together = threading.Barrier(count)

    class Engine:
        def health(self, timeout_s):
            together.wait(60)  # as in a collective that all have to join
            return True

    register = Register(paths, lambda: ids, lambda member: Engine())
    with ThreadPoolExecutor(publish._THREADS) as threads:
        assert len(register.live(threads)) == count
