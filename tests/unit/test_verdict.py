"""The last verdict of a run: which component failed, why, where, and what was done about it."""

import json
import os
import subprocess
import sys
import time

import fake_slurm
import pytest
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.launch import requeue
from relax_hpc.launch.supervision import SUPERVISION
from relax_hpc.runs import verdict
from relax_hpc.runs.verdict import Failed
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return fake_slurm.make(tmp_path, monkeypatch)


def started(run, rank, node, *errors):
    paths = RunPaths(run.run_dir)
    with EventWriter(paths.events("actor", rank), "actor", rank) as events:
        events.emit("start", attempt="7.0", start=1, node=node)
        for error in errors:
            events.emit("error", message=error)


def judged(run, what="restarted", **fields):
    """What is said of a component that has failed so."""
    common = {"component": "actor", "start": 2, "code": 1, "since": time.time() - 5, "failures": 2}
    common |= {"max_restarts": 3, "window_s": 1800.0, "next_s": 1.0}
    verdict.judge(run.run_dir, "7", what, Failed(**(common | fields)))
    return words(run)


def words(run):
    return json.loads(RunPaths(run.run_dir).verdict.read_text())["words"]


def test_it_says_who_failed_why_where_and_what_was_done(run):
    started(run, 0, "n1")
    started(run, 1, "n2", "TrainingError: not finite\nmore")
    assert judged(run) == (
        "actor: start 2 ended with exit code 1 on n2 (actor-1: TrainingError: not finite); "
        "started again in 1 s, restart 2 of 3 within 30 min, 1 left"
    )
    said = judged(run, "ended", start=4, failures=4)
    assert said.endswith("; failed 4 times within 30 min, which ended the run")
    found = verdict.read(run.run_dir)
    assert (found.node, found.exit_code, found.attempt) == ("n2", 1, "7.0")


def test_of_a_task_in_a_step_of_its_own_it_says_which_and_nothing_that_another_said(run):
    """Task 0 has failed since task 1 began, and task 1 is killed without a word."""
    started(run, 0, "n1", "TrainingError: not finite")
    started(run, 1, "n2")
    said = judged(run, code=137, ranks=(1,))
    assert said.startswith("actor-1: start 2 killed by SIGKILL on n2; started again in 1 s")
    assert (verdict.read(run.run_dir).component, verdict.read(run.run_dir).error) == ("actor", "")
    said = judged(run, ranks=(0, 1))
    assert said.startswith("actor: start 2 ended with exit code 1 on n1 (actor-0: Training")


def test_of_a_killed_task_it_says_the_signal_and_no_error_of_an_earlier_start(run):
    started(run, 0, "n1", "TrainingError: of an earlier start")
    started(run, 1, "n2")
    log = run.run_dir / "submission" / "7_batch.log"
    log.write_text("srun: error: n9: task 0: Killed\nsrun: error: n2: task 1: Killed\nx\n")
    said = judged(run, code=137, since=time.time() + 1)
    assert said.startswith("actor: start 2 killed by SIGKILL on n2; started again in 1 s")
    assert verdict.read(run.run_dir).signal == "SIGKILL"


def test_what_slurm_announced_is_not_hidden_by_the_ends_that_follow(run, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    requeue.ask("7", run.run_dir)
    assert words(run) == "out of time or preempted: requeued, for the time number 3"
    for what in ("restarted", "ended", "stopped"):
        verdict.give(run.run_dir, "7", what, "it ended")
    assert "requeued" in words(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    verdict.give(run.run_dir, "7", "restarted", "the next attempt")
    assert words(run) == "the next attempt"


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ("2:30", "time limit reached"),  # Slurm may announce it a minute sooner
        ("2:31", "preempted"),
        ("UNLIMITED", "out of time or preempted"),
    ],
)
def test_why_slurm_announced_an_end_follows_from_the_time_that_is_left(run, left, why):
    run.says(f"7+0|RUNNING|n1|7|None|N/A|{left}", "7+1|RUNNING|n2|8|None|N/A|UNLIMITED")
    requeue.answer("7", run.run_dir, is_sure=True)
    assert words(run) == f"{why}: requeued, for the time number 1"


def restarts(run, *counts):
    """squeue knows how often each component was requeued."""
    answer = "".join(f"echo '{count}   '\n" for count in counts)
    (run.folder / "squeue").write_text(f"#!/bin/bash\n[[ $* = *RestartCnt* ]] || exit 2\n{answer}")


def test_a_requeue_that_ends_who_asks_for_it_is_one_and_no_refusal(run):
    # Its requeue ends all processes of the job, and it is one of them.
    (run.folder / "scontrol").write_text("#!/bin/bash\nkill -TERM $$\nsleep 5\n")
    restarts(run, 1, 1)
    assert requeue.ask("7", run.run_dir) == ""
    assert words(run) == "out of time or preempted: requeued, for the time number 1"
    restarts(run, 0, 0)
    assert requeue.ask("7", run.run_dir)
    assert verdict.read(run.run_dir).what == "refused"


@pytest.mark.parametrize(
    ("counts", "what", "said"),
    [((3, 3), "requeued", "requeued by Slurm, for the time number 3"), ((2, 2), "stopped", "told")],
)
def test_a_job_that_is_told_to_end_was_requeued_where_slurm_counts_so(
    run, monkeypatch, counts, what, said
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    restarts(run, *counts)
    verdict.give(run.run_dir, "7", "restarted", "a node died")
    tell(monkeypatch, run, "--what", "stopped", "--words", "told")
    assert (verdict.read(run.run_dir).what, words(run)) == (what, said)
    verdict.give(run.run_dir, "7", "requeued", "with step 4 saved: requeued")
    tell(monkeypatch, run, "--what", "stopped", "--words", "told")
    assert words(run) == "with step 4 saved: requeued"


def test_of_a_run_that_was_cancelled_nothing_else_is_said_but_that_it_is_complete(run, monkeypatch):
    paths = RunPaths(run.run_dir)
    for job in ("7", "8"):
        write_json(paths.cancellation(job), {})
    verdict.give(run.run_dir, "7", "requeued", "by a task that asked just before")
    verdict.give(run.run_dir, "7", "cancelled", "by somebody")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for job in ("7", "8"):  # its other side
        for what in ("requeued", "refused", "restarted", "stopped"):
            verdict.give(run.run_dir, job, what, "later")
        verdict.give_requeue(run.run_dir, job)
    assert words(run) == "by somebody"
    verdict.give(run.run_dir, "9", "restarted", "after a resume")
    assert words(run) == "after a resume"
    verdict.give(run.run_dir, "7", "cancelled", "by somebody")
    verdict.give(run.run_dir, "7", "completed", "it was quicker")
    assert words(run) == "it was quicker"


def tell(monkeypatch, run, *options):
    """As the script does."""
    monkeypatch.setattr(sys, "argv", ["verdict", str(run.run_dir), "--job-id", "7", *options])
    verdict.main()


def test_an_attempt_that_ended_without_a_word_was_requeued_as_the_next_one_says(run, monkeypatch):
    def next_begins(number):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        tell(monkeypatch, run, "--what", "requeued", "--before")
        return words(run)

    assert next_begins(1) == "requeued by Slurm, for the time number 1"  # a node died
    assert verdict.read(run.run_dir).attempt == "7.0"
    verdict.give(run.run_dir, "7", "restarted", "of this attempt")
    assert next_begins(1) == "of this attempt"
    assert next_begins(2) == "requeued by Slurm, for the time number 2"
    verdict.give(run.run_dir, "7", "requeued", "out of time")
    assert next_begins(3) == "out of time"


def test_status_has_it_and_only_its_owner_may_read_it(run, monkeypatch):
    run.run_dir.chmod(0o700)
    os.umask(0)
    tell(monkeypatch, run, "--what", "stopped", "--words", "it was told to end")
    assert RunPaths(run.run_dir).verdict.stat().st_mode & 0o777 == 0o600
    said = CliRunner().invoke(app, ["status", str(run.run_dir), "--json"]).output
    assert json.loads(said)["verdict"]["what"] == "stopped"
    RunPaths(run.run_dir).verdict.write_text("{")
    assert "last verdict" not in CliRunner().invoke(app, ["status", str(run.run_dir)]).output


def supervised(*settings):
    """What bash says of a component that fails under these settings."""
    common = "job_id=7 restart_window_s=1800 ask_controller=(true) look_every_s=15"
    text = "\n".join([common, SUPERVISION, *settings, "(supervise actor 1 /nowhere -- false)"])
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30)
    return done.stdout


def test_the_script_tells_every_restart_and_the_end_in_order():
    """2 restarts of 2 that are allowed, then the end."""
    tell = 'tell() { echo "told $*"; }'
    said = supervised("max_restarts=2 restart_delays_s=(0.25 0.5)", tell).splitlines()
    told = [line.split()[1:] for line in said if line.startswith("told ")]
    facts = [dict(zip(line[1::2], line[2::2], strict=True)) for line in told]
    assert [line[0] for line in told] == ["restarted", "restarted", "ended"]
    assert [each["--failures"] for each in facts] == ["1", "2", "3"]
    assert [each.get("--next") for each in facts] == ["0.25", "0.5", None]
    assert {each["--component"] for each in facts} == {"actor"}
    # A run goes on where the verdict cannot be written.
    said = supervised("max_restarts=1 restart_delays_s=(0) verdict=(false)")
    assert said.count("ended with exit code") == said.count("could not be written") == 2
