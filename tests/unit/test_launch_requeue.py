"""A task to which Slurm announces that its job is about to end."""

import os
import signal

import fake_slurm
import pytest

from relax_hpc.launch import requeue, states

ANNOUNCED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)


@pytest.fixture
def run(tmp_path, monkeypatch):
    before = {number: signal.getsignal(number) for number in ANNOUNCED}
    yield fake_slurm.make(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)
    states.has_accounting.cache_clear()


@pytest.mark.parametrize(("asks", "asked"), [(True, ["scontrol requeue 7"]), (False, [])])
def test_one_task_asks_for_a_requeue_and_all_go_on_until_they_are_ended(run, asks, asked):
    requeue.install("7", run.run_dir, asks=asks)
    for number in ANNOUNCED:
        os.kill(os.getpid(), number)
    assert run.asked("scontrol") == asked


def test_a_job_is_not_requeued_without_end(run, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "999")
    requeue.ask("7", run.run_dir)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1000")
    requeue.ask("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert "has been, 1000 times" in caplog.messages[-1]
