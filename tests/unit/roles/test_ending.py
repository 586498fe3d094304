"""The announced end of a job: who says so, what is saved, who asks for a requeue, and when."""

import json
import mmap
import signal
import subprocess
import sys
import threading
import time

import fake_slurm
import psutil
import pytest
from role_fakes import Journal, wait_for

from relax_hpc.launch import requeue
from relax_hpc.roles import ending
from relax_hpc.roles.ending import Ending, LastSave
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import SoloWorld
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
    heard = [hearing(run, how) for how in ("asks", "other")]
    every = [process for task, child in heard for process in (task, child)]
    try:
        for number in (signal.SIGUSR2, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
            for process in every:
                process.send_signal(number)
            time.sleep(0.1)
        wait_for(lambda: run.asked("scontrol"))
        time.sleep(1)
        assert run.asked("scontrol") == ["scontrol requeue 7"]
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


TRAINS = """
import sys, time
from pathlib import Path
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.launch import requeue
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.roles import ending
from relax_hpc.roles.ending import LastSave
run_dir, stops_in = Path(sys.argv[1]), sys.argv[2]
ending.LOOK_EVERY_S = 0.0
requeue.install("7", run_dir, asks=True)

def phase(name):
    if name == stops_in and Trainer.step in (0, 2):
        print(name, flush=True)
        sys.stdin.readline()

class Trainer:
    step = 0

class Saves:
    times = ()

    def now(self):
        phase("last save")
        print("saved", Trainer.step, flush=True)
        return True

phase("start")
print("started", flush=True)
last = LastSave(SoloWorld(), Trainer, Saves(), ending.Ending(RunPaths(run_dir), "7.0"))
while True:
    last()
    if Trainer.step == 2 and stops_in in ("drain", "last save"):
        print("idle", flush=True)
        while not last._ending.is_near():
            time.sleep(0.05)
        continue
    phase("update")
    Trainer.step += 1
    print("trained", Trainer.step, flush=True)
    phase("save")
    time.sleep(0.05)
"""
ENDS = {
    # phase: steps trained and saved from the signal on, and when a requeue is asked for
    "start": ([], "at once"),
    "update": (["trained 1", "saved 1"], "then"),
    "save": (["saved 2"], "then"),
    "last save": (["saved 2"], "then"),
    "drain": (["saved 2"], "then"),
}


@pytest.mark.parametrize("phase", ENDS)
def test_a_signal_in_any_phase_and_a_second_one_is_one_save_and_one_requeue(run, phase):
    steps, when = ENDS[phase]
    task = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(run.run_dir), phase],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    asked = RunPaths(run.run_dir).saves("7.0")

    def said(line):
        return iter(task.stdout.readline, f"{line}\n")

    try:
        before = list(said("idle" if phase in ("drain", "last save") else phase))
        task.send_signal(signal.SIGUSR2)
        if phase == "last save":
            assert list(said(phase)) == []
        wait_for(paths_of(run).ending("7.0").exists)
        if phase == "start":
            wait_for(lambda: run.asked("scontrol"))
        else:
            time.sleep(0.3)
            task.send_signal(signal.SIGUSR1)  # a second one, of another kind
        if phase != "drain":
            assert (when == "at once") is bool(run.asked("scontrol")), "a save is waited for"
            task.stdin.write("\n")
            task.stdin.flush()
        wait_for(lambda: run.asked("scontrol"))
        after = [task.stdout.readline().strip() for _ in steps]
        assert after == steps and (phase == "start" or json.loads(asked.read_text())["step"])
        time.sleep(1)
        assert run.asked("scontrol") == ["scontrol requeue 7"] and task.poll() is None
        assert "saved" not in "".join(before)
    finally:
        task.kill()
        task.wait()
        rest = task.stdout.read()
    trained = [line for line in rest.splitlines() if line.startswith("trained")]
    assert phase == "start" or trained == [], "nothing is trained behind the save"


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


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_task_that_is_done_ends_well_whatever_comes_while_its_interpreter_ends(run, number):
    task = subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(run.run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert task.stdout.readline() == "ends\n"
    time.sleep(0.3)
    task.send_signal(number)
    assert task.wait(20) == 0
