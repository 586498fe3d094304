"""A job is requeued only so often."""

import fake_slurm
import pytest

from relax_hpc.launch import requeue, states


@pytest.fixture
def run(tmp_path, monkeypatch):
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


def test_a_job_is_not_requeued_without_end(run, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "999")
    requeue.ask("7", run.run_dir)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1000")
    requeue.ask("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]
    assert "has been, 1000 times" in caplog.messages[-1]
