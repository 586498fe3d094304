"""What a new user expects of the command line, row by row; each case carries its row's words."""

import json
import os
import time
from pathlib import Path

import fake_slurm
import pytest
import typer.main
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.launch import known_runs, states
from relax_hpc.paths import RunPaths


def row(text):
    return pytest.mark.parametrize("row", [text], ids=[text])


def cli(*words, **environment):
    return CliRunner(env=environment).invoke(app, [str(word) for word in words])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RELAX_RUN_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)


def write_steps(run_dir, *events):
    path = RunPaths(run_dir).events("actor", 0)
    path.parent.mkdir(exist_ok=True)
    common = {"role": "actor", "rank": 0, "pid": 1, "time": time.time(), "event": "step"}
    path.write_text("".join(f"{json.dumps(common | event)}\n" for event in events))


@row("--version, -h, --install-completion")
def test_a_program_has_the_options_that_every_program_has(row):
    assert cli("--version").output == "relax-hpc 0.1.0\n"
    for command in ([], ["status"], ["bus", "ls"]):
        assert cli(*command, "-h").output == cli(*command, "--help").output != ""
    assert "--install-completion" in cli("-h").output


def commands(group=None, path=()):
    for name, each in (group or typer.main.get_command(app)).commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


def test_the_help_of_every_command_has_an_example_of_it():
    found = dict(commands())
    assert len(found) > 28
    for name, each in found.items():
        assert f"relax-hpc {name}" in (each.epilog or ""), name


@row("--version, -h, --install-completion")
def test_names_of_runs_are_completed(run, row, tmp_path, monkeypatch):
    known_runs.remember(run.run_dir)
    (tmp_path / "runs" / "other").mkdir()
    elsewhere(tmp_path, monkeypatch)
    asked = {"_RELAX_HPC_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for typed, said in (("relax-hpc status r", "run"), ("relax-hpc cancel x", "")):
        answer = CliRunner(env=asked | {"COMP_WORDS": typed}).invoke(app, prog_name="relax-hpc")
        assert answer.output.strip() == said


@row("list my runs")
def test_my_runs_are_listed_with_state_step_reward_and_age(run, row, tmp_path, monkeypatch):
    run.says("7+0|RUNNING", "7+1|RUNNING")
    write_steps(run.run_dir, {"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.5})
    assert cli("ls").output.splitlines()[1].split() == ["run", "RUNNING", "4/30", "0.500", "0", "s"]
    elsewhere(tmp_path, monkeypatch)
    assert cli("ls").output == "no runs yet; start one: relax-hpc submit JOB\n"
    known_runs.remember(run.run_dir)
    known_runs.remember(tmp_path / "gone" / "away")
    [listed] = json.loads(cli("ls", "--json").output)
    assert listed["run_dir"] == str(run.run_dir) and listed["reward"] == 0.5
    run.asked("squeue")
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


@row("list my runs")
def test_many_runs_are_one_question_to_slurm_and_those_of_one_name_are_told_apart(run, row):
    twin = copy(run, run.run_dir.parents[1] / "b" / "run", "8", time.time() - 7200)
    known_runs.remember(twin)
    run.says("7+0|RUNNING", "8+0|PENDING")
    lines = cli("ls").output.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [str(run.run_dir), "RUNNING"], [str(twin), "PENDING"],
    ]  # fmt: skip
    assert lines[2].endswith("2.0 h")
    assert len(run.asked("squeue")) == 1
    assert cli("ls", "-n", "1").output.splitlines()[-1] == (
        "and up to 1 older ones: relax-hpc ls -n 2"
    )


@row("relative paths: status NAME works only where runs/ lies")
def test_a_run_is_found_by_its_name_from_any_folder(run, row, tmp_path, monkeypatch):
    run.leaves(0)
    elsewhere(tmp_path, monkeypatch)
    assert "no such run" in str(cli("status", "run").exception)
    assert cli("status", "run", RELAX_RUN_ROOT=str(run.run_dir.parent)).exit_code == 0
    known_runs.remember(run.run_dir)
    assert cli("status", "run").output.startswith("run: COMPLETED")
    assert str(cli("status", "rum").exception) == "rum: no such run; did you mean run?"
    twin = copy(run, tmp_path / "b" / "run", "8", 1.0)
    known_runs.remember(twin)
    assert str(cli("cancel", "run").exception).startswith("run: is the name of several runs; give ")
    monkeypatch.chdir(tmp_path)
    assert cli("status", "run").exit_code == 0, "that of runs/ comes first"


def test_links_to_runs_are_the_users_own_and_those_of_removed_runs_go(run, tmp_path):
    known_runs.remember(run.run_dir)
    links = tmp_path / "state" / "relax-hpc" / "runs"
    assert links.stat().st_mode & 0o777 == 0o700
    (tmp_path / "b" / "old").mkdir(parents=True)
    known_runs.remember(tmp_path / "b" / "old")
    known_runs.remember(Path("/not/mounted/now/run"))
    (tmp_path / "b" / "old").rmdir()
    known_runs.remember(run.run_dir)
    assert {link.readlink().name for link in links.iterdir()} == {"run"}
    assert len(list(links.iterdir())) == 2
    assert known_runs.everywhere() == [run.run_dir]


def test_without_a_place_for_links_nothing_fails(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    known_runs.remember(run.run_dir)
    assert known_runs.called("run") == []
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    known_runs.remember(run.run_dir)
    assert known_runs.called("run") == [] and os.environ["HOME"]


@row("relative paths: RELAX_RUN_ROOT is the place of runs whose job names none")
def test_a_job_without_a_run_root_takes_that_of_the_environment(job, row, tmp_path):
    text = Path("job.toml").read_text()
    root = {"RELAX_RUN_ROOT": str(tmp_path / "scratch")}
    said = cli("check", "job.toml", "--local", **root).output
    assert f'"run_root": "{tmp_path / "runs"}"' in said, "the job's own comes first"
    Path("job.toml").write_text(text.replace('run_root = "runs"', ""))
    answer = cli("check", "job.toml", "--local", **root)
    assert f'"run_root": "{tmp_path / "scratch"}"' in answer.output
    assert f'"run_root": "{tmp_path / "runs"}"' in cli("check", "job.toml", "--local").output
