"""A job is requeued only so often, not once it is cancelled, and Slurm is asked in time."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from relax_hpc.launch import requeue
from relax_hpc.runs import verdict
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def run(slurm, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return slurm


def does(run, name, text):
    """Has a command of Slurm's do this before it answers."""
    script = run.folder / name
    head, command = script.read_text().split("\n", 1)
    script.write_text(f"{head}\n{text}\n{command}")


def test_a_job_is_not_requeued_without_end(run, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "999")
    requeue.ask("7", run.run_dir)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1000")
    requeue.ask("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert "has been, 1000 times" in caplog.messages[-1]


def test_a_job_that_was_cancelled_is_not_requeued_by_anybody(run):
    paths = RunPaths(run.run_dir)
    write_json(paths.cancellation("7"), {"time": 0.0})
    requeue.announce("7", run.run_dir)
    requeue.take_over("7", run.run_dir)
    assert "the run was cancelled" in read_json(paths.ending("7.0"))["refused"]
    requeue.answer("7", run.run_dir, is_sure=True)
    requeue.ask("7", run.run_dir, hold_for="it had nothing to do")
    assert run.asked("scontrol") == []
    assert run.asked("scancel") == ["scancel 7"] * 3, "one that was silent may answer now"
    said = json.loads(paths.verdict.read_text())
    assert said["what"] == "refused" and "not requeued: the run was cancelled" in said["words"]
    assert requeue.ask("9", run.run_dir) == "", "the job of a later resume"


def cancelled_by(run, name, text=""):
    """Cancels the run in the moment in which this command of Slurm's is called."""
    does(run, name, f"echo '{{}}' > {RunPaths(run.run_dir).cancellation('7')}\n{text}")


def test_a_requeue_that_was_on_its_way_as_the_run_was_cancelled_is_undone(run):
    cancelled_by(run, "scontrol")
    assert "the run was cancelled" in requeue.ask("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert run.asked("scancel") == ["scancel 7"]


def test_the_time_that_is_left_is_asked_of_squeue_alone_and_counts_on_meanwhile(run):
    run.says("7+0|RUNNING|n1|7|None|N/A|1:00", "7+1|RUNNING|n2|8|None|N/A|2:00")
    does(run, "sacct", "sleep 9")
    does(run, "squeue", "sleep 1")
    begun = time.monotonic()
    left_s = requeue.read_left_s("7")
    assert 60 - (time.monotonic() - begun) <= left_s <= 59
    assert run.asked("sacct") == []


def test_a_silent_squeue_takes_no_more_of_the_notice_than_it_was_waited_for(run, monkeypatch):
    monkeypatch.setattr(requeue, "_LOOK_S", 1.0)
    asked = []
    monkeypatch.setattr(requeue, "ask_in_time", lambda *_, **limits: asked.append(limits))
    does(run, "squeue", "exec sleep 30")
    begun = time.monotonic()
    requeue.answer("7", run.run_dir, is_sure=True)
    took = time.monotonic() - begun
    [limits] = asked
    assert limits["left_s"] is None and took < 20
    assert requeue.SIGNAL_AHEAD_S - took <= limits["most_s"] <= requeue.SIGNAL_AHEAD_S - 1


class OddError(Exception):
    """Of no class that anybody expects."""


def hear(run, monkeypatch, *sure):
    """Has the thread that answers hear of these ends, one after the other, and then nothing."""
    rest = threading.Event()
    give = verdict.give
    monkeypatch.setattr(requeue, "tell", lambda job, folder, *said: give(folder, job, *said))
    ends = list(sure)

    def get():
        if not ends:
            rest.set()
            threading.Event().wait()
        return ends.pop(0)

    heard = SimpleNamespace(get=get)
    thread = threading.Thread(target=requeue._act, args=("7", run.run_dir, heard), daemon=True)
    thread.start()
    assert rest.wait(60), "the thread has ended"
    assert thread.is_alive()


def fail_at_first(monkeypatch, module, name, error):
    real, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


# G1
@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, OddError("odd")) for name in ("announce", "ask_in_time", "is_unsaved", "ask")),
        ("read_left_s", SystemExit(3)),
    ],
)
def test_whatever_fails_the_requeue_is_asked_for_and_the_next_end_is_heard(
    run, monkeypatch, caplog, name, error
):
    fail_at_first(monkeypatch, requeue, name, error)
    hear(run, monkeypatch, True, True)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert type(error).__name__ in caplog.text
    said = json.loads(RunPaths(run.run_dir).verdict.read_text())
    assert said["what"] == "requeued" and type(error).__name__ in said["words"]
    assert "asked" in read_json(RunPaths(run.run_dir).ending("7.0")), "roles were told to save"


def test_a_requeue_that_could_not_be_asked_for_is_not_told_as_one(run, monkeypatch):  # G1
    real = requeue.output_of

    def output_of(command, *args, **kwargs):
        if command[0] == "scontrol":
            raise OddError("no room for a process")
        return real(command, *args, **kwargs)

    monkeypatch.setattr(requeue, "output_of", output_of)
    hear(run, monkeypatch, True)
    said = json.loads(RunPaths(run.run_dir).verdict.read_text())
    assert said["what"] == "refused" and "OddError: no room for a process" in said["words"]


def test_an_end_that_nobody_is_sure_of_is_no_reason_to_requeue_a_job_if_looking_fails(
    run, monkeypatch
):  # G1
    fail_at_first(monkeypatch, requeue, "read_left_s", OddError("odd"))
    hear(run, monkeypatch, False)
    assert run.asked("scontrol") == []


def test_a_verdict_that_cannot_be_told_keeps_nobody_from_asking(run, monkeypatch):  # G1, O1
    does(run, "scontrol", "printf 'Projet pr\\xe9par\\xe9\\n' >&2; trap 'exit 1' EXIT")
    monkeypatch.setattr(requeue.sys, "executable", "/nowhere/python\0")
    requeue.answer("7", run.run_dir, is_sure=True)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert "pr\ufffdpar\ufffd" in read_json(RunPaths(run.run_dir).ending("7.0"))["refused"]
