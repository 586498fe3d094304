"""What a new user expects of the command line."""

import json
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.launch import known_runs
from relax_hpc.runs import overview, report, status
from relax_hpc.runtime.paths import RunPaths


def cli(*words, **environment):
    return CliRunner(env=environment).invoke(app, [str(word) for word in words])


@pytest.fixture
def run(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RELAX_RUN_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return slurm


def write_steps(run_dir, *events):
    path = RunPaths(run_dir).events("actor", 0)
    path.parent.mkdir(exist_ok=True)
    common = {"role": "actor", "rank": 0, "pid": 1, "time": time.time(), "event": "step"}
    path.write_text("".join(f"{json.dumps(common | event)}\n" for event in events))


def test_a_run_is_found_by_its_name_from_any_folder(run, tmp_path, monkeypatch):
    run.leaves(0)
    monkeypatch.chdir(run.folder)
    assert "no such run" in str(cli("status", "run").exception)
    assert cli("status", "run", RELAX_RUN_ROOT=str(run.run_dir.parent)).exit_code == 0
    known_runs.remember(run.run_dir)
    assert cli("status", "run").output.startswith("run: COMPLETED")
    assert str(cli("status", "rum").exception) == "rum: no such run; did you mean run?"
    monkeypatch.chdir(tmp_path)
    assert cli("status", "run").exit_code == 0, "that of runs/ comes first"


def test_of_a_run_that_waits_the_reason_and_the_expected_start_are_said(run):
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    run.says(f"7+0|PENDING||1|Resources|{start}|1:00:00", "7+1|PENDING||2|None|N/A|")
    said = cli("status", "run").output
    assert said.startswith("run: PENDING (Resources)\n")
    assert f"waits for nodes to be free; expected to start at {start[11:16]}\n" in said
    assert cli("ls").output.splitlines()[1].split()[1:3] == ["PENDING", "(Resources)"]


def test_following_says_why_the_job_waits_and_when_it_waits_no_more(run, monkeypatch):
    asked = []

    def sleep(_):
        asked.append(len(run.asked("squeue")))
        if len(asked) == 5:
            run.says("7+0|PENDING||1|Priority|N/A|", "7+1|PENDING||2|Priority|N/A|")
        if len(asked) == 10:
            run.says("7+0|RUNNING", "7+1|RUNNING")
        if len(asked) == 15:
            run.leaves(0)
            run.says("7+0|COMPLETED", "7+1|COMPLETED")

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: len(asked) * 2.0))
    run.says("7+0|PENDING||1|Resources|N/A|", "7+1|PENDING||2|Resources|N/A|")
    assert list(report.progress(run.run_dir)) == [
        "PENDING (Resources): waits for nodes to be free",
        "PENDING (Priority): others are before it in the queue",
        "RUNNING",
    ]
    assert asked[:6] == [1, 1, 1, 1, 1, 2], "ten seconds are five rounds"


STEP = (
    "step {}/30 | reward 0.303 | staleness 0.0 (max 0) | loss -0.003 | trained 2.7k tok/s | "
    "3.3 s (wait 0.7 read 0.1 forward_backward 2.0 update 0.0 publish 0.0 save 0.0) | ETA 3 min"
)
WARNING = "/x/lib/python3.11/site-packages/torch/a.py:3: FutureWarning: this is old\n  old()\n"


def logged(second, task, text, level="INFO", logger="relax_hpc.roles.actor.rank0"):
    return f"2026-01-02 10:00:{second:02} host1 {task} {level} {logger}: {text}\n"


def write_logs(run_dir):
    folder = run_dir / "submission"
    (folder / "7_batch.log").write_text(
        "2026-01-02T10:00:09 actor: start 1 ended with exit code 1\n"
    )
    (folder / "rollout" / "7_0_log.err").write_text(
        WARNING + logged(1, "rollout-0", "engine is healthy")
        + logged(5, "rollout-0", "engine is slow", "WARNING")
    )  # fmt: skip
    (folder / "actor" / "7_0_log.out").write_text("a print\n")
    (folder / "actor" / "7_0_log.err").write_text(
        logged(2, "actor-0", STEP.format(" 1")) + WARNING + logged(4, "actor-0", STEP.format(" 2"))
        + "Traceback (most recent call last):\n  File x\nValueError: odd\n"
    )  # fmt: skip
    os.utime(folder / "actor" / "7_0_log.out", (0, 0))


def test_logs_are_in_order_of_time_without_the_warnings_of_libraries(run):
    write_logs(run.run_dir)
    answer = cli("logs", "run")
    assert [line.split(":")[0] for line in answer.stdout.splitlines()] == [
        "actor-0", "rollout-0", "actor-0", "actor-0", "actor-0", "actor-0", "actor-0", "rollout-0",
        "job",
    ]  # fmt: skip
    assert answer.stdout.splitlines()[4:7] == [
        "actor-0: Traceback (most recent call last):", "actor-0:   File x",
        "actor-0: ValueError: odd",
    ]  # fmt: skip
    assert "Warning" not in answer.stdout and "old()" not in answer.stdout
    assert answer.stderr == "left out: warnings of libraries, 2; --all shows them\n"
    everything = cli("logs", "run", "--all")
    assert everything.stdout.count("FutureWarning") == 2 and everything.stderr == ""
    assert len(everything.stdout.splitlines()) == len(answer.stdout.splitlines()) + 4


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m said\tthis \u202eback"


@pytest.mark.parametrize("options", [(), ("-n", 1)])
def test_what_a_model_or_an_agent_has_printed_does_not_act_on_the_terminal(run, options):
    write_logs(run.run_dir)
    path = run.run_dir / "submission" / "actor" / "7_0_log.err"
    path.write_text(logged(30, "actor-0", HOSTILE))
    last = cli("logs", "run", *options).stdout.splitlines()[-1]
    assert last.endswith(": ␛]0;owned␇␛[2J\ufffd31m said\tthis \ufffdback")


def test_the_last_lines_of_all_logs_can_be_had_alone(run):
    write_logs(run.run_dir)
    whole = cli("logs", "run").stdout.splitlines(keepends=True)
    for count in (0, 1, 2, 5, 99):
        assert cli("logs", "run", "-n", count).stdout == "".join(whole[-count or len(whole) :])


def test_a_run_is_resumed_with_other_resources_and_more_steps_but_trains_the_same(run):
    run.leaves(1)
    paths = RunPaths(run.run_dir)
    before = json.loads(paths.config.read_text())
    for setting, said in (
        ("schedule.num_steps=20", "schedule.num_steps=20: is less than 30; to end earlier, cancel"),
        ("actor.resources.time=never", "actor.resources.time"),
    ):
        answer = cli("resume", "run", "--set", setting, "--local")
        assert said in str(answer.exception), (setting, answer.exception)
    assert json.loads(paths.config.read_text()) == before and run.asked("sbatch") == []
    (paths.checkpoints / "step_00000030").mkdir(parents=True)
    weights = f"checkpoint: --set model.weights={paths.checkpoints}/step_00000030"
    assert str(cli("resume", "run", "--set", "seed=3", "--local").exception).endswith(weights)
    run.leaves(0)
    (run.folder / "sinfo").unlink()
    run.refuses("sbatch: error: Batch job submission failed: Invalid account\n")
    monkey = ("--set", "schedule.num_steps=60", "--set", "resources.time=2-00:00:00")
    more = (*monkey, "--set", "actor.save_every=7")
    with without_partitions():
        assert "Invalid account" in str(cli("resume", "run", *more).exception)
        assert json.loads(paths.config.read_text()) == before
        (run.folder / "refusal").unlink()
        answer = cli("resume", "run", *more)
    assert answer.exit_code == 0, answer.exception
    now = json.loads(paths.config.read_text())
    assert now["schedule"]["num_steps"] == 60 and now["actor"]["save_every"] == 7
    assert now["actor"]["resources"]["time"] == "2-00:00:00"
    assert now["engines"]["rollout"]["resources"]["time"] == "2-00:00:00"
    assert json.loads(paths.config_before(2).read_text()) == before
    assert "actor.save_every: 10 -> 7\n" in answer.stderr
    script = (run.run_dir / "submission" / "9_submission.sh").read_text()
    assert script.count("#SBATCH --time=2-00:00:00") == 2


@contextmanager
def without_partitions():
    """Looks at no cluster: `sinfo` is not what is tried here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("check_partitions", "check_limits", "Cluster.nodes"):
            patch.setattr(f"relax_hpc.launch.cluster.{name}", lambda *_: None)
        yield


def test_a_job_begins_after_another_or_after_a_run(run):
    for asked, words in (("123", "afterok:123"), ("1,2", "afterok:1:2"), ("afterany:5",) * 2):
        assert overview.on_job(asked) == words
    assert overview.on_job("run") is None
    run.says("7+0|RUNNING", "7+1|PENDING")
    assert overview.on_run(run.run_dir) == "afterok:7"
    run.says("7+0|FAILED", "7+1|FAILED")
    with pytest.raises(ConfigError, match="--depend run: is FAILED, so nothing would ever begin"):
        overview.on_run(run.run_dir)
    run.says("7+0|COMPLETED", "7+1|COMPLETED")
    assert overview.on_run(run.run_dir) is None
