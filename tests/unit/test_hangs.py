"""A task that hangs is named with its stack, and ended; one that waits or goes on is left alone."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from toys import until

from relax_hpc.runs import verdict
from relax_hpc.runtime import heartbeat, process
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.heartbeat import Beat, Doing
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

TOY = Path(__file__).with_name("hanging.py")


@pytest.fixture
def start(tmp_path):
    """Starts a task of a component, which hangs in the way that is named."""
    started = []

    def begin(how, *options, rank=0):
        started.append(subprocess.Popen([sys.executable, TOY, tmp_path, str(rank), how, *options]))
        until((tmp_path / f"{rank}.pid").exists)
        return started[-1]

    yield begin
    for task in started:
        task.kill()
        task.wait()


def hangs(run_dir):
    return [event for event in read_events(run_dir / "events") if event["event"] == "hang"]


@pytest.mark.parametrize(
    ("how", "phase", "place"),
    [
        ("hold_the_interpreter", "work", "in hold_the_interpreter"),
        ("stand_still", "loop", "in loop"),
    ],
)
def test_a_task_that_hangs_is_named_with_its_stack_and_ended(tmp_path, start, how, phase, place):
    assert start(how).wait(30) == -signal.SIGKILL
    [hang] = hangs(tmp_path)
    told = [hang[key] for key in ("phase", "step", "ended", "role", "rank")]
    assert told == [phase, 7, True, "toy", 0]
    assert place in hang["place"] and str(TOY) in hang["place"]
    said, task = verdict.last_error(tmp_path, ["toy"], 0.0)
    assert said.startswith(f"toy-0: hangs in phase {phase} of step 7 for ") and task == "toy-0"
    log = Path(hang["log"])
    assert log == RunPaths(tmp_path).log("hang", "toy-0")
    assert "most recent call" in log.read_text(encoding="utf-8")


def test_a_task_whose_threads_run_tells_where_its_main_thread_is_and_comes_to_no_harm(start):
    """To read the stacks of threads that run ends a process now and then."""
    task = start("compute", "patient")
    os.kill(children(task.pid)[0], signal.SIGKILL)  # its watchdog, which would end it
    links = Path(f"/proc/{task.pid}/fd").iterdir()
    [fd] = [each for each in links if "memfd:stacks" in str(each.readlink())]
    stacks = os.open(fd, os.O_RDONLY)
    until(lambda: "in compute" in process.python_stacks(task.pid, stacks))  # it has just begun
    for _ in range(40):
        said = process.python_stacks(task.pid, stacks)
        assert "in compute" in said, said
        assert "Thread 0x" not in said
    assert task.poll() is None
    os.close(stacks)


def test_what_ends_a_task_that_is_continued_for_its_stack_does_not_hide_where_it_was(
    tmp_path, start
):
    """A stopped task with a signal in wait, of which it dies as soon as it runs again."""
    task = start("waits")
    os.kill(task.pid, signal.SIGSTOP)
    until(lambda: process.facts(task.pid).state == "T")
    os.kill(task.pid, signal.SIGSEGV)
    assert task.wait(30) == -signal.SIGSEGV
    until(lambda: hangs(tmp_path))
    [hang] = hangs(tmp_path)
    assert hang["state"] == "T" and hang["ended"]


def test_a_stopped_task_is_named_with_its_stack_and_ended_even_where_it_waits(tmp_path, start):
    task = start("waits", "threads")
    time.sleep(0.3)
    os.kill(task.pid, signal.SIGSTOP)
    assert task.wait(30) == -signal.SIGKILL
    [hang] = hangs(tmp_path)
    assert hang["state"] == "T" and "stopped (state T)" in hang["message"]
    assert "in main" in hang["place"] and not (tmp_path / "0.done").exists()


def test_a_task_that_was_stopped_for_a_moment_is_left_alone_though_it_has_waited_for_long(
    tmp_path, start
):
    task = start("waits", "patient")
    time.sleep(2)  # longer than its limit, if it did not wait
    os.kill(task.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(task.pid, signal.SIGCONT)
    assert task.wait(30) == 0 and hangs(tmp_path) == []


def test_a_record_of_what_is_done_is_of_now(tmp_path, monkeypatch):
    clock = [1000.0]
    now = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
    monkeypatch.setattr(heartbeat, "time", now)
    record = heartbeat.DoingFile(tmp_path / "doing" / "actor-0.json")
    long, short = (Doing("actor", 0, "n1", name, 3, 4.0, 1000.0) for name in ("w" * 48, "read"))

    def found():
        """What is read; its time is the file server's."""
        return [each._replace(time=1000.0) for each in heartbeat.read_doing(tmp_path / "doing")]

    assert record.is_due
    record.write(long)
    assert not record.is_due and found() == [long]
    clock[0] += heartbeat.EVERY_S
    assert record.is_due
    record.write(short)
    assert found() == [short], "nothing is left of what was longer"
    (tmp_path / "doing" / "actor-1.json").write_bytes(b'{"component": "act')
    assert found() == [short]
    clock[0] += 100
    assert heartbeat.read_doing(tmp_path / "doing") == [], "its task has ended"


@pytest.mark.parametrize("how", ["waits", "go_on"])
def test_a_task_that_waits_for_others_or_goes_on_is_left_alone(tmp_path, start, how):
    assert start(how).wait(30) == 0
    assert hangs(tmp_path) == []


@pytest.mark.parametrize("how", ["in_a_collective", "in_a_wait"])
def test_of_ranks_that_wait_for_each_other_the_one_is_ended_that_waits_for_nobody(
    tmp_path, start, how
):
    waiter = start(how, "world", rank=0)
    culprit = start("sleep", "world", rank=1)
    assert culprit.wait(30) == -signal.SIGKILL
    assert waiter.poll() is None
    assert {hang["rank"] for hang in hangs(tmp_path) if hang["ended"]} == {1}


def test_the_watchdog_ends_with_its_task_and_ignores_what_slurm_tells_the_step(start):
    task = start("waits")
    [watchdog] = children(task.pid)
    os.kill(watchdog, signal.SIGUSR2)
    os.kill(watchdog, signal.SIGTERM)
    time.sleep(0.1)
    assert children(task.pid) == [watchdog]
    task.kill()
    task.wait()
    until(lambda: not Path(f"/proc/{watchdog}").exists())


def children(pid):
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split())]


@pytest.fixture
def heart(monkeypatch):
    """A sign of life of this process, and the clock that it goes by."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    memory = mmap.mmap(-1, heartbeat.BYTES)
    heartbeat.begin(memory, least_s=10, most_s=1000)
    yield memory, clock
    heartbeat.end()


def take(name, seconds, heart):
    """The limit that a phase had which takes so long."""
    memory, clock = heart
    with heartbeat.phase(name):
        limit_s = Beat.read(memory).limit_s
        clock.now += seconds
    return limit_s


def test_the_limit_of_a_phase_is_learned_from_the_times_that_it_took(heart):
    for seconds in (30, 20, 10):
        assert take("train", seconds, heart) == take("read", 0.1, heart) == 1000
    assert take("train", 900, heart) == 150 and take("read", 0.1, heart) == 10
    assert take("train", 1, heart) == 1000, "no limit is above the highest"
    assert take("save", 1, heart) == 1000


def test_what_a_task_says_that_it_does_is_shown_and_changes_no_limit(heart):
    memory, clock = heart
    with heartbeat.phase("loop"):
        for _ in range(3):
            clock.now += 1
            heartbeat.beat()
        for _ in range(2):
            heartbeat.say("waits (no_engine)")
            clock.now += 7
            heartbeat.beat()
        told = Beat.read(memory)
        with heartbeat.phase("inner"):
            inner = Beat.read(memory)
    assert (told.phase, told.began, told.since, told.limit_s) == ("waits (no_engine)", 103, 117, 35)
    assert (inner.phase, inner.began) == ("inner", 117)


def test_who_holds_for_storage_waits_whichever_thread_it_is(heart, tmp_path, monkeypatch):
    seen, full = [], [OSError(28, "no room"), None]

    def call():
        seen.append(Beat.read(heart[0]).waits)
        if error := full.pop(0):
            raise error

    storage.settle(60)
    monkeypatch.setattr(storage, "time", time)
    try:
        storage.patiently(tmp_path, call)
    finally:
        storage.settle(0)
    assert seen == [False, True] and not Beat.read(heart[0]).waits
