"""Submitting without Slurm: what is checked, what is made, how it is watched and ended."""

import errno
import json
import os
import shutil
import time

import pytest
from typer.testing import CliRunner

from relax_hpc import job_file
from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.job_file import read_resolved, validate
from relax_hpc.launch import local, partitions, record
from relax_hpc.launch import submit as submit_module
from relax_hpc.launch.local import processes
from relax_hpc.launch.submit import submit
from relax_hpc.paths import RunPaths
from relax_hpc.runs import logs
from relax_hpc.runs.cancel import cancel
from relax_hpc.runs.status import collect, overall


@pytest.fixture
def job(tmp_path, tiny_model):
    for name in ("train", "heldout"):
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def make(**changes):
        tree = {
            "name": "run",
            "run_root": str(tmp_path / "my runs"),
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "prompts": {
                "train": str(tmp_path / "train.jsonl"),
                "chat_template": False,
            },
            "eval": {"heldout": {"path": str(tmp_path / "heldout.jsonl")}},
            "schedule": {"num_steps": 100000, "prompts_per_step": 2},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
        }
        return validate(tree | changes, source="test")

    return make


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.1)


def test_a_dry_run_shows_the_script_and_creates_nothing(tmp_path, job):
    before = sorted(tmp_path.rglob("*"))
    submission = submit(job(), local=True, dry_run=True)
    assert submission.job_id is None and "relax_hpc.launch.local_step" in submission.script
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actor": {"layout": {"tensor_parallel": 64}}},
            "actor.layout.tensor_parallel = 64: does not divide",
        ),
        ({"model": {"path": "/nowhere"}}, "model.path = '/nowhere': no such folder"),
        ({"prompts": {"train": "/no.jsonl"}}, "/no.jsonl: no such file"),
        ({"launch": {"profile": "nowhere"}}, "launch.profile = 'nowhere': no such profile"),
        ({"run_root": "/proc/1/runs"}, "run_root = '/proc/1/runs'"),
    ],
)
def test_a_run_that_cannot_work_is_refused_and_leaves_nothing(tmp_path, job, changes, message):
    with pytest.raises(ConfigError) as error:
        submit(job(**changes), local=True)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "my runs").exists()


@pytest.mark.parametrize("at", ["relax_hpc.bus.layout.create", "relax_hpc.launch.record.write"])
def test_a_disk_that_is_full_while_a_run_is_made_leaves_nothing(tmp_path, job, monkeypatch, at):
    started = []
    start = local.start

    def starting(*args):
        started.append(start(*args))
        return started[-1]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local, "start", starting)
    monkeypatch.setattr(at, full)
    with pytest.raises(LaunchError, match="No space left on device; nothing was started") as error:
        submit(job(), local=True)
    assert "\n" not in str(error.value) and not (tmp_path / "my runs").exists()
    assert len(started) == (at.endswith("write"))
    assert not any(each.controller.find() for each in started), "what was not recorded has ended"
    monkeypatch.undo()
    assert submit(job(), local=True, dry_run=True).run_dir.name == "run", "the name is free"


def test_a_link_to_no_folder_is_said_to_be_one(tmp_path, job):
    (tmp_path / "my runs").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"my runs is a link to .*gone, which is not there; make"):
        submit(job(), local=True)


def test_check_asks_slurm_only_without_local(job, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(job_file, "load", lambda *_: job())
    found = partitions.Partitions()
    monkeypatch.setattr(partitions, "partitions", lambda: asked.append("sinfo") or found)
    monkeypatch.setattr(partitions, "check_limits", lambda _: asked.append("scontrol"))
    monkeypatch.setattr(
        submit_module, "expected_start", lambda *_: asked.append("sbatch") or "at 7"
    )
    for options in ([], ["--local"]):
        answer = CliRunner().invoke(app, ["check", "job.toml", *options])
        assert answer.exit_code == 0, answer.exception
        assert json.loads(answer.stdout)["name"] == "run"
        assert ("at 7\n" in answer.stderr) is (not options)
    assert asked == ["sinfo", "scontrol", "sbatch"]


def test_engines_weights_and_the_reference_are_looked_at_before_the_job(tmp_path, job, tiny_model):
    """Each job is wrong in one way, which nothing else looks for."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((tiny_model / "config.json").read_text())
    steps = {"num_steps": 1, "prompts_per_step": 2, "max_staleness": 0}
    pool = {"placement": "actor", "count": 2}
    wrong = {
        "engines have 2 ranks, the actor has 1": {
            "engines": {"rollout": pool}, "schedule": steps,
        },
        "weights.quantize = 'fp8': the embedded engine": {"weights": {"quantize": "fp8"}},
        f"reference.path = {other}: has neither model.safetensors": {
            "reference": {"path": str(other), "placement": "actor"},
            "schedule": steps,
            "algorithm": {"kl": {"coefficient": 0.1}},
        },
    }  # fmt: skip
    for message, tables in wrong.items():
        with pytest.raises(ConfigError) as error:
            submit(job(**tables), local=True, dry_run=True)
        assert message in str(error.value)


def test_a_local_run_is_recorded_watched_and_ended_whole(tmp_path, job):
    submission = submit(job(), local=True)
    try:
        run_dir = submission.run_dir
        paths = RunPaths(run_dir)
        resolved = read_resolved(paths.config)
        assert resolved.run_dir == run_dir and resolved.run_root.is_absolute()
        launched = record.read(run_dir)
        assert [(each.name, each.tasks) for each in launched.components] == [
            ("rollout", 1), ("actor", 1)]  # fmt: skip
        with pytest.raises(ConfigError, match=r"name = 'run'.*choose another name"):
            submit(job(), local=True)

        folders = [component.folder for component in launched.components]
        until(lambda: all(len(processes(folder, launched.leader)) == 2 for folder in folders))
        tasks = [each for folder in folders for each in processes(folder, launched.leader)]
        assert all(each.find() for each in tasks)
        status = collect(run_dir)
        assert (status.state, status.mode, status.job_id) == ("RUNNING", "local", launched.leader)
        assert json.loads(status.to_json())["components"][1]["name"] == "actor"
        spoken = {"rollout-0", "actor-0"}
        until(lambda: {line.source for line in logs.lines(run_dir)} >= spoken)
    finally:
        cancel(submission.run_dir)
    assert not any(each.find() for each in tasks)
    assert collect(run_dir).state == "CANCELLED"
    cancel(run_dir)  # again: nothing to do, no complaint
    assert any("ended with exit code" in line.text for line in logs.lines(run_dir, "job"))
    assert {line.source for line in logs.lines(run_dir, "actor")} == {"actor-0"}


def test_following_a_log_waits_for_the_second_half_of_a_line(tmp_path, job):
    submission = submit(job(), local=True)
    cancel(submission.run_dir)
    path = dict(logs.sources(submission.run_dir))["actor-0"]
    path.write_text("one\ntw")
    rounds = iter([False, False, True])

    def until_the_third_round():
        over = next(rounds)
        if over:
            path.write_text("one\ntwo\nthree")
        return over

    lines = logs.follow(submission.run_dir, "actor", until=until_the_third_round)
    assert [line.text for line in lines if line.text in ("one", "tw", "two", "three")] == [
        "one", "two", "three"]  # fmt: skip


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        collect(tmp_path)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["FAILED", "RUNNING"], "RUNNING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["CANCELLED", "COMPLETED"], "CANCELLED"),
    ],
)
def test_a_run_is_active_while_any_component_is_then_as_bad_as_its_worst(found, state):
    assert overall(found) == state
