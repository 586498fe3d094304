"""A job is requeued only so often, not once it is cancelled, and Slurm is asked in time."""

import json
import time

import fake_slurm
import pytest

from relax_hpc.launch import requeue, states
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


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
    write_json(paths.cancelled("7"), {"time": 0.0})
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
    does(run, name, f"echo '{{}}' > {RunPaths(run.run_dir).cancelled('7')}\n{text}")


def test_a_requeue_that_was_on_its_way_as_the_run_was_cancelled_is_undone(run):
    cancelled_by(run, "scontrol")
    assert "the run was cancelled" in requeue.ask("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert run.asked("scancel") == ["scancel 7"]


def test_while_the_controller_is_silent_the_run_may_be_cancelled(run, monkeypatch):
    monkeypatch.setattr(requeue, "_RETRY_S", 0.01)
    run.is_silent()
    cancelled_by(run, "scontrol")
    assert requeue.ask("7", run.run_dir, until=time.monotonic() + 20)
    assert len(run.asked("scontrol")) == 1


def test_the_time_that_is_left_is_asked_of_squeue_alone_and_counts_on_meanwhile(run):
    run.says("7+0|RUNNING|n1|7|None|N/A|1:00", "7+1|RUNNING|n2|8|None|N/A|2:00")
    does(run, "sacct", "sleep 9")
    does(run, "squeue", "sleep 1")
    begun = time.monotonic()
    left_s = requeue.left_s("7")
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
