"""What a new user expects of the command line; test_expectations names it row by row."""

import json
import os
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.launch import known_runs
from relax_hpc.runs import logs, overview, report, status, summary
from relax_hpc.runs import logs as run_logs
from relax_hpc.runtime import devices
from relax_hpc.runtime.paths import RunPaths


def cli(*words, **environment):
    return CliRunner(env=environment).invoke(app, [str(word) for word in words])


@pytest.fixture
def run(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RELAX_RUN_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return slurm


def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)


def write_steps(run_dir, *events):
    path = RunPaths(run_dir).events("actor", 0)
    path.parent.mkdir(exist_ok=True)
    common = {"role": "actor", "rank": 0, "pid": 1, "time": time.time(), "event": "step"}
    path.write_text("".join(f"{json.dumps(common | event)}\n" for event in events))


def test_a_program_has_the_options_that_every_program_has():
    assert cli("--version").output == "relax-hpc 0.1.0\n"
    for command in ([], ["status"], ["bus", "ls"]):
        assert cli(*command, "-h").output == cli(*command, "--help").output != ""
    assert "--install-completion" in cli("-h").output


def test_names_of_runs_are_completed(run, tmp_path, monkeypatch):
    known_runs.remember(run.run_dir)
    (tmp_path / "runs" / "other").mkdir()
    elsewhere(tmp_path, monkeypatch)
    asked = {"_RELAX_HPC_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for typed, said in (("relax-hpc status r", "run"), ("relax-hpc cancel x", "")):
        answer = CliRunner(env=asked | {"COMP_WORDS": typed}).invoke(app, prog_name="relax-hpc")
        assert answer.output.strip() == said


def test_my_runs_are_listed_with_state_step_reward_and_age(run, tmp_path, monkeypatch):
    run.says("7+0|RUNNING", "7+1|RUNNING")
    write_steps(run.run_dir, {"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.5})
    assert cli("ls").output.splitlines()[1].split() == ["run", "RUNNING", "4/30", "0.500", "0", "s"]
    elsewhere(tmp_path, monkeypatch)
    assert cli("ls").output == "no runs yet; start one: relax-hpc submit JOB\n"
    known_runs.remember(run.run_dir)
    known_runs.remember(tmp_path / "gone" / "away")
    [listed] = json.loads(cli("ls", "--json").output)
    assert listed["run_dir"] == str(run.run_dir) and listed["reward"] == 0.5
    assert cli("ls", RELAX_RUN_ROOT=str(run.run_dir.parent)).output.count("RUNNING") == 1


def copy(run, folder, job, when):
    """Another run of that name, of another job."""
    paths = RunPaths(folder)
    paths.control.mkdir(parents=True)
    paths.config.write_text(RunPaths(run.run_dir).config.read_text())
    tree = json.loads(RunPaths(run.run_dir).launch_record.read_text())
    tree |= {"leader": job, "time": when}
    for component in tree["components"]:
        component["job_id"] = component["job_id"].replace("7", job)
    paths.launch_record.write_text(json.dumps(tree))
    return folder


def test_many_runs_are_one_question_to_slurm_and_those_of_one_name_are_told_apart(run):
    twin = copy(run, run.run_dir.parents[1] / "b" / "run", "8", time.time() - 7200)
    known_runs.remember(twin)
    run.says("7+0|RUNNING", "8+0|PENDING")
    lines = cli("ls").output.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [str(run.run_dir), "RUNNING"], [str(twin), "PENDING"],
    ]  # fmt: skip
    assert len(run.asked("squeue")) == 1


def test_a_run_is_found_by_its_name_from_any_folder(run, tmp_path, monkeypatch):
    run.leaves(0)
    elsewhere(tmp_path, monkeypatch)
    assert "no such run" in str(cli("status", "run").exception)
    assert cli("status", "run", RELAX_RUN_ROOT=str(run.run_dir.parent)).exit_code == 0
    known_runs.remember(run.run_dir)
    assert cli("status", "run").output.startswith("run: COMPLETED")
    assert str(cli("status", "rum").exception) == "rum: no such run; did you mean run?"
    known_runs.remember(copy(run, tmp_path / "b" / "run", "8", 1.0))
    assert str(cli("cancel", "run").exception).startswith("run: is the name of several runs; give ")
    monkeypatch.chdir(tmp_path)
    assert cli("status", "run").exit_code == 0, "that of runs/ comes first"


def test_a_job_without_a_run_root_takes_that_of_the_environment(job, tmp_path):
    text = Path("job.toml").read_text(encoding="utf-8")
    root = {"RELAX_RUN_ROOT": str(tmp_path / "scratch")}
    said = cli("check", "job.toml", "--local", **root).output
    assert f'"run_root": "{tmp_path / "runs"}"' in said, "the job's own comes first"
    Path("job.toml").write_text(text.replace('run_root = "runs"', ""), encoding="utf-8")
    assert (
        f'"run_root": "{tmp_path / "scratch"}"'
        in cli("check", "job.toml", "--local", **root).output
    )
    assert f'"run_root": "{tmp_path / "runs"}"' in cli("check", "job.toml", "--local").output


NOW = time.time()


def slurm_time(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def test_of_a_run_that_waits_the_reason_and_the_expected_start_are_said(run):
    start = NOW + 3600
    run.says(f"7+0|PENDING||1|Resources|{slurm_time(start)}|1:00:00", "7+1|PENDING||2|None|N/A|")
    lines = cli("status", "run").output.splitlines()
    assert lines[0] == "run: PENDING (Resources)"
    clock = time.strftime("%H:%M", time.localtime(start))
    expected = f"  queue         waits for nodes to be free; expected to start at {clock}"
    assert expected in lines
    assert cli("ls").output.splitlines()[1].split()[1:3] == ["PENDING", "(Resources)"]
    for reason, said in (
        ("QOSMaxGRESPerUser", "its QOS has all it may at once; starts when others end, never if"),
        ("QOSMaxWallDurationPerJobLimit", "never starts: its QOS does not allow a job what it"),
        ("AssocMaxGRESPerNode", "never starts: its account does not allow a job what it asks for"),
        ("QOSMaxJobsPerUserLimit", "there are as many jobs as its QOS allows; starts when others"),
        ("AssocGrpGRESMinutes", "the hours of its account are used up; waits for new ones, or"),
        ("AssocGrpCPURunMinutesLimit", "its account has all it may at once; starts when others"),
        ("QOSNotAllowed", "never starts: its QOS is not for its partition; cancel it, change"),
    ):
        run.says(f"7+0|PENDING||1|{reason}|N/A|", f"7+1|PENDING||2|{reason}|N/A|")
        assert f"  queue         {said}" in cli("status", "run").output, reason


def test_of_a_run_that_runs_elapsed_and_remaining_time_reward_and_speed_are_said(run):
    begin = slurm_time(time.time() - 7200)
    run.says(f"7+0|RUNNING|n1|1|None|{begin}|1-02:00:00", f"7+1|RUNNING|n2|2|None|{begin}|22:00:00")
    write_steps(run.run_dir, {"step": 9, "reward/mean": 0.25, "num_tokens": 5400, "time/step": 2.0})
    lines = [line.strip() for line in cli("status", "run").output.splitlines()]
    assert "elapsed       2.0 h, 22.0 h left of its time limit" in lines
    assert "reward        0.250 at step 9" in lines and (
        "speed         2.7k tokens/s trained, with prompts" in lines
    )
    assert "started again" not in "".join(lines)
    said = json.loads(cli("status", "run", "--json").output)
    assert said["left_s"] == 22 * 3600 and abs(said["start"] - time.time() + 7200) < 60


def test_restarts_of_several_steps_add_up_and_of_one_with_several_tasks_do_not():
    starts = [
        {"event": "start", "role": role, "attempt": "7.0", "start": start, "step_from": first}
        for role, of_rank_1 in (("rollout", 1), ("actor", 0))
        for first, start in ((0, 1), (0, 3), (of_rank_1, 1), (of_rank_1, 2))
    ]
    assert summary._restarts(starts) == {"rollout": 3, "actor": 2}


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


def test_ctrl_c_says_that_the_run_goes_on_and_how_to_look_again(run, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_logs, "time", SimpleNamespace(sleep=interrupted))
    run.says("7+0|RUNNING", "7+1|RUNNING")
    answer = cli("logs", "run", "-f")
    assert answer.exit_code == 130
    assert answer.stderr == (
        "\nrun goes on; look again with relax-hpc watch run, end it with relax-hpc cancel run\n"
    )


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


def test_the_last_lines_of_all_logs_can_be_had_alone_and_others_as_they_come(run, monkeypatch):
    write_logs(run.run_dir)
    whole = cli("logs", "run").stdout.splitlines(keepends=True)
    for count in (0, 1, 2, 5, 99):
        assert cli("logs", "run", "-n", count).stdout == "".join(whole[-count or len(whole) :])
    path = run.run_dir / "submission" / "actor" / "7_0_log.err"

    def sleep(_):
        with path.open("a") as file:
            file.write(logged(7, "actor-0", "more"))
        run.leaves(0)
        run.says("7+0|COMPLETED", "7+1|COMPLETED")

    run.says("7+0|RUNNING", "7+1|RUNNING")
    monkeypatch.setattr(run_logs, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    monkeypatch.setattr(status, "_ENDING_S", 0.0)
    said = cli("logs", "run", "-f", "-n", "1").stdout.splitlines()
    assert said[0].startswith("job: ") and said[1].endswith(": more") and len(said) == 2


def test_a_step_is_one_line_at_80_columns(run):
    def shown(text, width, source="actor-0"):
        return logs.short(run_logs.LogLine(source, text.rstrip(), ""), width)

    step = logged(2, "actor-0", STEP.format("12"))
    assert shown(step, 80) == (
        "actor-0: 10:00:02 step 12/30 | reward 0.303 | 2.7k tok/s | 3.3 s | ETA 3 min"
    )
    assert "loss -0.003 | trained 2.7k" in shown(step, 100) and "staleness" not in shown(step, 100)
    assert shown(step, 300).endswith(STEP.format("12"))
    assert shown(logged(2, "a", "slow", "WARNING"), 80) == "actor-0: 10:00:02 WARNING slow"
    assert shown("2026-01-02T10:00:09 x: giving up", 80, "job") == "job: 10:00:09 x: giving up"
    assert shown("  File x", 80) == "actor-0:   File x"


def test_a_run_is_resumed_with_other_resources_and_more_steps_but_trains_the_same(run):
    run.leaves(1)
    paths = RunPaths(run.run_dir)
    before = json.loads(paths.config.read_text())
    for setting, said in (
        ("seed=3", "would change what is trained"),
        ("schedule.num_steps=20", "schedule.num_steps=20: is less than 30; to end earlier, cancel"),
        ("actor.save_evry=3", "did you mean actor.save_every?"),
        ("actor.resources.time=never", "actor.resources.time"),
    ):
        answer = cli("resume", "run", "--set", setting, "--local")
        assert said in str(answer.exception), (setting, answer.exception)
    assert json.loads(paths.config.read_text()) == before and run.asked("sbatch") == []
    (paths.checkpoints / "step_00000030").mkdir(parents=True)
    weights = f"checkpoint: --set model.weights={paths.checkpoints}/step_00000030"
    assert str(cli("resume", "run", "--set", "seed=3", "--local").exception).endswith(weights)
    run.leaves(0)
    refused = str(cli("resume", "run", "--set", "actor.save_every=7").exception)
    assert "is complete, 30 steps; to go on add e.g. --set schedule.num_steps=60, or" in refused
    assert refused.endswith(weights)

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


def test_a_reward_is_any_function_of_a_file(job):
    Path("mine.py").write_text("def score(sample):\n    return 1.0\n", encoding="utf-8")
    answer = cli("check", "job.toml", "--local", "--set", "reward.name=mine.py:score")
    assert answer.exit_code == 0, answer.exception


def test_in_the_home_folder_a_run_leaves_a_link_and_nothing_else(run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME")
    known_runs.remember(run.run_dir)
    run.leaves(0)
    for command in ("ls", "status", "logs"):
        assert cli(command, *["run"][: command != "ls"]).exit_code == 0
    [link] = [path for path in home.rglob("*") if path.is_symlink() or path.is_file()]
    assert link.parent == home / ".local" / "state" / "relax-hpc" / "runs"


def test_a_failed_run_without_steps_has_no_curve_to_show(run):  # defect 12
    paths = RunPaths(run.run_dir)
    paths.reward_curve.touch()
    run.says("7+0|FAILED", "7+1|FAILED")
    assert "curve" not in cli("status", "run").output
    write_steps(run.run_dir, {"step": 4, "reward/mean": 0.5})
    assert f"reward curve  {paths.reward_curve}\n" in cli("status", "run").output


def test_what_megatron_says_of_packages_that_are_not_there_is_left_out():  # defect 15
    text = "Transformer Engine and Apex are not installed. Falling back"
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        devices.hush()
        for module in ("megatron.core.optimizer", "mine"):
            warnings.warn_explicit(text, UserWarning, "x.py", 1, module=module)
        warnings.warn_explicit("odd", UserWarning, "x.py", 2, module="megatron.core")
    assert [str(each.message) for each in said] == [text, "odd"]
