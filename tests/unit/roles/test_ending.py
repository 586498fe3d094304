"""The announced end of a job, and a step that the time limit would cut off: who does what."""

import json
import mmap
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import fake_slurm
import psutil
import pytest
from role_fakes import Journal, wait_for

from relax_hpc.launch import requeue
from relax_hpc.roles import ending
from relax_hpc.roles.ending import MARGIN_S, Admission, Ending, LastSave
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.heartbeat import Beat
from relax_hpc.runtime.paths import RunPaths

REFUSAL = "#!/bin/sh\ncd {folder}\necho scontrol $* >> asked\necho Requested operation is disabled >&2\nexit 1\n"  # noqa: E501
SILENT_ONCE = """#!/bin/sh
cd {folder}
echo scontrol $* >> asked
[ -e answers ] || {{ touch answers; echo "Unable to contact slurm controller" >&2; exit 1; }}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(ending, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(requeue, "_RETRY_S", 0.01)
    return fake_slurm.make(tmp_path, monkeypatch)


def scontrol(run, text):
    (run.folder / "scontrol").write_text(text.format(folder=run.folder))


def paths_of(run):
    return RunPaths(run.run_dir)


def seen(run):
    return Ending(paths_of(run), "7.0")


def verdict(run):
    return json.loads(paths_of(run).verdict.read_text())["words"]


def test_one_of_many_announces_it_and_after_a_refusal_one_may_again(run):
    assert not seen(run).is_near()
    assert [requeue.announce("7", run.run_dir) for _ in range(3)] == [True, False, False]
    assert seen(run).is_near()
    scontrol(run, REFUSAL)
    requeue.ask_in_time("7", run.run_dir, left_s=60)
    assert not seen(run).is_near()
    assert requeue.announce("7", run.run_dir) and seen(run).is_near()


def test_the_next_attempt_knows_nothing_of_it(run, monkeypatch):
    requeue.announce("7", run.run_dir)
    assert not Ending(paths_of(run), "7.1").is_near()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue.announce("7", run.run_dir)


def test_a_requeue_is_asked_for_once_the_step_is_saved_and_the_verdict_names_it(run):
    requeue.announce("7", run.run_dir)
    trainer = seen(run)
    trainer.will_save()
    asking = threading.Thread(
        target=requeue.ask_in_time, args=("7", run.run_dir), kwargs={"left_s": 60}
    )
    asking.start()
    time.sleep(0.5)
    assert run.asked("scontrol") == [], "nothing is asked while the save is under way"
    trainer.note_saved(12)
    asking.join(20)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert verdict(run).startswith("time limit reached, with step 12 saved: requeued, for")
    said = json.loads(paths_of(run).ending("7.0").read_text())
    assert 0.5 <= said["asked"] - said["time"] < 20, "until it was saved"
    assert 30 <= said["limit"] - said["asked"] <= 60


def test_where_nobody_saves_it_is_asked_for_at_once_and_where_time_is_short_without_the_save(run):
    begun = time.monotonic()
    requeue.ask_in_time("7", run.run_dir, left_s=3600)
    seen(run).will_save()
    requeue.ask_in_time("7", run.run_dir, left_s=requeue.MARGIN_S + 0.3)
    assert time.monotonic() - begun < 20 and len(run.asked("scontrol")) == 2
    said = "time limit reached, and a save was not done in time: requeued"
    assert verdict(run).startswith(said)


def test_a_critic_is_waited_for_as_the_actor_is_and_who_is_done_for_good_is_not(run):
    actor, critic = seen(run), Ending(paths_of(run), "7.0", paths_of(run).critic_saves("7.0"))
    for each in (actor, critic):
        each.will_save()
    actor.note_saved(4)
    records = paths_of(run).saves("7.0"), paths_of(run).critic_saves("7.0")
    assert requeue.is_unsaved(records)
    LastSave(SoloWorld(), Trainer(), Saves(Journal()), critic).close()
    assert not requeue.is_unsaved(records)
    requeue.ask_in_time("7", run.run_dir, left_s=60)
    assert "with step 4 saved: requeued" in verdict(run)


def test_a_controller_that_is_silent_is_asked_again_and_one_that_refuses_is_not(run):
    scontrol(run, SILENT_ONCE)
    assert requeue.ask("7", run.run_dir, until=time.monotonic() + 30) == ""
    assert len(run.asked("scontrol")) == 2
    scontrol(run, REFUSAL)
    saved = ", with step 4 saved"
    said = requeue.ask("7", run.run_dir, until=time.monotonic() + 30, saved=saved)
    assert len(run.asked("scontrol")) == 3
    assert said == verdict(run) and said.startswith("out of time or preempted, with step 4 saved, ")
    assert "Requested operation is disabled" in said and said.endswith("resume it")


HEARS = """
import subprocess, sys, threading, time
from pathlib import Path
from relax_hpc.launch import requeue
# Its signals are not blocked, as those of a library's threads are not.
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
requeue.install("7", Path(sys.argv[1]), asks=sys.argv[2] == "asks")
child = subprocess.Popen(["sleep", "600"])  # Slurm signals what a task has started, too
print(child.pid, flush=True)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def hearing(run, how):
    task = subprocess.Popen(
        [sys.executable, "-c", HEARS, str(run.run_dir), how], stdout=subprocess.PIPE, text=True
    )
    child = int(task.stdout.readline())
    assert task.stdout.readline() == "ready\n"
    return task, psutil.Process(child)


def test_signals_that_come_twice_and_together_are_one_requeue_and_the_task_goes_on(run):
    scontrol(run, "#!/bin/sh\ncd {folder}\necho scontrol $* by $PPID >> asked\n")
    heard = [hearing(run, how) for how in ("asks", "other")]
    every = [process for task, child in heard for process in (task, child)]
    try:
        heard[1][0].send_signal(signal.SIGUSR2)  # earlier, and it is not the one to ask
        time.sleep(0.5)
        for number in (signal.SIGUSR2, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
            for process in every:
                process.send_signal(number)
            time.sleep(0.1)
        wait_for(lambda: run.asked("scontrol"))
        time.sleep(1)
        assert run.asked("scontrol") == [f"scontrol requeue 7 by {heard[0][0].pid}"]
        assert [task.poll() for task, _ in heard] == [None, None]
        assert all(child.status() == psutil.STATUS_SLEEPING for _, child in heard)
        for task, _ in heard:
            task.terminate()
        time.sleep(1)
        assert [task.poll() for task, _ in heard] == [None, None]
    finally:
        for task, child in heard:
            child.kill()
            task.kill()
            task.wait()


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("7+0|RUNNING|n1|7|None|N/A|0:12", ["scontrol requeue 7"]),  # preempted: grace is left
        ("7+0|RUNNING|n1|7|None|N/A|5:00:00", []),  # a step that is ended
        ("7+0|COMPLETING|n1|7|None|N/A|0:12", []),  # cancelled
    ],
)
def test_a_bare_term_counts_only_where_squeue_says_that_the_job_ends_soon(run, line, asked):
    run.says(line)
    requeue.answer("7", run.run_dir, is_sure=False)
    assert run.asked("scontrol") == asked
    assert seen(run).is_near() is bool(asked)


class Saves:
    times = ()

    def __init__(self, journal, works=True):
        self.journal, self.works = journal, works

    def now(self):
        self.journal.note("saved")
        return self.works


class Trainer:
    step = 5


@pytest.mark.parametrize("works", [True, False])
def test_the_trainer_saves_says_so_and_waits_for_the_end_and_goes_on_if_it_does_not_come(
    run, works
):
    journal, mine = Journal(), seen(run)
    last = LastSave(SoloWorld(), Trainer(), Saves(journal, works), mine)
    record = paths_of(run).saves("7.0")
    assert json.loads(record.read_text())["step"] is None
    last()
    assert journal == [], "nothing is announced"
    requeue.announce("7", run.run_dir)
    memory = mmap.mmap(-1, heartbeat.BYTES)

    def task():
        heartbeat.begin(memory, least_s=1, most_s=1)
        last()

    waiting = threading.Thread(target=task, daemon=True)
    waiting.start()
    wait_for(lambda: json.loads(record.read_text()) == {"step": 5})
    assert journal == [("saved",)] and waiting.is_alive(), "it trains no further step"
    wait_for(lambda: Beat.read(memory).waits, 10)  # so its watchdog leaves it alone
    heartbeat.end()
    scontrol(run, REFUSAL)
    requeue.ask_in_time("7", run.run_dir, left_s=60)
    waiting.join(20)
    assert not waiting.is_alive()
    said = json.loads(record.read_text())
    assert said["step"] is None, "the next end that is announced waits for the next save, too"


class Others:
    """The world as a rank sees it that is told by rank 0."""

    def __init__(self, says):
        self.says = says

    def bcast(self, mine):
        assert mine is False
        return self.says


@pytest.mark.parametrize("says", [True, False])
def test_other_ranks_save_when_rank_0_says_so_and_wait_for_nobody(says):
    journal = Journal()
    LastSave(Others(says), Trainer(), Saves(journal), None)()
    assert journal == [("saved",)] * says


LEAVES = """
import sys, threading, time
from pathlib import Path
from relax_hpc.launch import requeue
threading.Thread(target=time.sleep, args=[600], daemon=True).start()  # blocks no signal
requeue.install("7", Path(sys.argv[1]), asks=True)
requeue.leave()

class Slow:
    def __del__(self):
        print("ends", flush=True)
        time.sleep(1.5)

held = Slow()  # as long as the interpreter ends
"""


def test_a_task_that_is_done_ends_well_whatever_comes_while_its_interpreter_ends(run):
    task = subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(run.run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert task.stdout.readline() == "ends\n"
    time.sleep(0.3)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        task.send_signal(number)
    assert task.wait(20) == 0


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(ending.time, "monotonic", lambda: self.now)


class End:
    """An allocation that ends at a time of the clock."""

    ahead_s = 0.0

    def __init__(self, clock, at):
        self.clock, self.at, self.announced = clock, at, []

    def compute_left_s(self):
        return None if self.at is None else self.at - self.clock.now

    def announce(self):
        self.announced.append(self.clock.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def trained(clock, end, *, seconds, saves=(), waited=0.0):
    """An admission that has seen steps of so many seconds, `waited` of each for its batch."""
    found = Admission(end, lambda: saves)
    for step, took in enumerate([*seconds, waited]):
        found.consider(step)
        if waited:
            clock.now += waited
            found.consider(step)
        clock.now += took - waited
    return found


def check_begins_with(needed_s, found, end, step=2):
    """A step begins where so many seconds are left, and not where less are."""
    end.at = end.clock.now + needed_s + 0.5
    found.consider(step)
    assert end.announced == []
    end.at -= 1
    found.consider(step)
    assert end.announced == [end.clock.now]


def test_a_step_begins_if_it_and_its_save_end_in_time_by_the_95th_percentile(clock):
    end = End(clock, None)
    # Twenty steps of which one was slow: the percentile is the 19th.
    seconds = [100.0] * 18 + [110.0, 500.0]
    found = trained(clock, end, seconds=seconds, saves=[7.0, 20.0])
    check_begins_with(110 + 20 + MARGIN_S, found, end, step=20)


def test_while_a_batch_is_waited_for_what_has_gone_by_counts(clock):
    end = End(clock, None)
    found = trained(clock, end, seconds=[100.0, 100.0], waited=60.0)  # 60 of this one, too
    end.at = clock.now + 40 + MARGIN_S + 5
    found.consider(2)
    assert end.announced == []  # as late as it ever was, and the 40 s after it fit in
    clock.now += 5
    found.consider(2)
    assert end.announced == []
    clock.now += 1  # the step's 100 s have not gone by, but it would end 1 s too late
    found.consider(2)
    assert end.announced == [clock.now]


def test_the_work_on_a_batch_is_still_to_come_however_late_it_is(clock):
    end = End(clock, None)
    found = trained(clock, end, seconds=[100.0, 100.0], waited=60.0)
    clock.now += 500
    check_begins_with(40 + MARGIN_S, found, end)


def test_a_step_that_the_announcement_would_cut_off_is_not_begun(clock):
    """Slurm announces the end, and rollout stops then, whatever would still fit."""
    end = End(clock, None)
    end.ahead_s = 90.0
    found = trained(clock, end, seconds=[100.0, 100.0], saves=[2.0])
    check_begins_with(100 + 90, found, end)


def test_a_save_of_the_critic_that_takes_longer_is_waited_for_too(tmp_path, clock):
    paths = RunPaths(tmp_path)
    paths.control.mkdir()
    saves = Saves(Journal())
    critic = LastSave(SoloWorld(), Trainer, saves, Ending(paths, "7.0", paths.critic_saves("7.0")))
    saves.times = (70.0, 60.0)
    assert not critic.is_due()  # and says how long its saves take
    actor = Ending(paths, "7.0")
    assert not actor.is_near()
    end = End(clock, None)
    found = Admission(end, lambda: [20.0], actor.critic_save_s)
    for step in range(2):
        found.consider(step)
        clock.now += 100
    check_begins_with(100 + 70 + MARGIN_S, found, end)


def test_the_first_step_is_tried_in_any_case_and_the_end_is_announced_once(clock):
    end = End(clock, clock.now + 1)
    found = Admission(end, lambda: [50.0])
    found.consider(7)
    assert end.announced == []
    clock.now += 100
    for step in (8, 8, 9):
        found.consider(step)
    assert len(end.announced) == 1


def test_a_save_that_needs_more_than_slurms_notice_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(requeue, "SIGNAL_AHEAD_S", 0.5)
    run.says("7|RUNNING|n1|7|None|N/A|10:00")
    end = requeue.SlurmJobEnd("7", run.run_dir)
    wait_for(lambda: end.compute_left_s() is not None)
    saving = Ending(RunPaths(run.run_dir), "7.0")
    saving.will_save()
    end.announce()
    time.sleep(1.5)
    assert run.asked("scontrol") == [], "far from the end of the allocation"
    assert "asked" not in read_json(RunPaths(run.run_dir).ending("7.0")), "nor will be at once"
    saving.note_saved(3)
    wait_for(lambda: run.asked("scontrol"))
    assert run.asked("scontrol") == ["scontrol requeue 7"]


def test_who_starts_after_an_announcement_asks_in_place_of_who_was_killed(run):
    run.says("7|RUNNING|n1|7|None|N/A|10:00")
    requeue.take_over("7", run.run_dir)
    assert requeue.announce("7", run.run_dir, refused=True)
    requeue.take_over("7", run.run_dir)
    assert run.asked("scontrol") == [], "nothing was announced, or it was refused"
    assert requeue.announce("7", run.run_dir)
    requeue.take_over("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]


def test_a_wait_for_a_batch_is_broken_off_when_the_work_on_it_would_not_fit(tmp_path, clock):
    """What rank 0 asks between two looks for groups."""

    class Announced:
        near = False

        def is_near(self):
            return self.near

        def critic_save_s(self):
            return 0.0

        def will_save(self, save_s=0.0):
            pass

    end, ending = End(clock, None), Announced()
    trainer = SimpleNamespace(step=3)
    saves = Saves(Journal())
    saves.times = (1.0,)
    last = LastSave(SoloWorld(), trainer, saves, ending, end)
    last()
    clock.now += 50
    trainer.step = 4
    last()
    end.at = clock.now + 50 + 1 + MARGIN_S
    assert not last.is_due() and end.announced == []
    clock.now += 1
    assert not last.is_due()
    assert end.announced == [clock.now], "and who hears of it says that it is near"
    ending.near = True
    assert last.is_due()
