"""Whole runs where Slurm prints other bytes, under GBK, without hard links: O1, O3, O7."""

import subprocess
import sys

import pytest
from e2e_runs import events_of, has_done, hurry, status, wait_for, wait_until, wait_until_over
from odd_places import PLACES, without_links
from test_stop import announce, is_requeued, submit_slow

from relax_hpc.launch import record
from relax_hpc.runs import verdict

STEPS = 60

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


def command(*arguments):
    """Runs a command in a process of its own, which has the locale and libraries of the place."""
    every = [sys.executable, "-m", "relax_hpc", *map(str, arguments)]
    answer = subprocess.run(every, capture_output=True, timeout=120)
    assert answer.returncode == 0, answer.stderr.decode(errors="replace")
    return answer.stdout.decode(errors="replace")


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_requeued_resumed_and_completes(tiny, tmp_path, monkeypatch, place):
    for name, value in place(tmp_path / "place").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    more = {"engines.rollout.resources.max_nodes": 2} if place is without_links else {}
    run_dir = submit_slow(tiny, tmp_path, run=command, **more | {"schedule.num_steps": STEPS})
    wait_until(run_dir, has_done(2), 250)
    announce(run_dir)
    wait_for(is_requeued(run_dir, 1), 150)
    said = verdict.read(run_dir)
    assert "saved: requeued, for the time number 1" in said.words
    wait_until(run_dir, has_done(4), 250)
    if more:
        command("scale", "out", run_dir, "--engines", "2")
        wait_for(lambda: any(row["id"] == "extra-1" for row in status(run_dir)["engines"]), 90)
    assert "RUNNING" in command("status", run_dir)
    command("cancel", run_dir)
    wait_until_over(run_dir, 90)
    command("resume", run_dir)
    assert record.read(run_dir).number == 2
    hurry(tmp_path)
    wait_until_over(run_dir, 300)
    assert status(run_dir)["state"] == "COMPLETED"
    steps = {event["step"] for event in events_of(run_dir, "actor", "step")}
    assert steps == {*range(1, STEPS + 1)}
