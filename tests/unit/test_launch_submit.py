"""Submitting without Slurm: what is checked, what is made, how it is watched and ended."""

import json
import time

import pytest

from relax_hpc.engines.tiny import checkpoint
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import read_resolved, validate
from relax_hpc.launch import logs, record
from relax_hpc.launch.cancel import cancel
from relax_hpc.launch.local import processes
from relax_hpc.launch.status import collect, overall
from relax_hpc.launch.submit import submit
from relax_hpc.paths import RunPaths


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokens = checkpoint.tokenizer()
    checkpoint.save(folder, checkpoint.model(tokens, seed=0), tokens)
    return folder


@pytest.fixture
def job(tmp_path, model):
    for name in ("train", "heldout"):
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def make(**changes):
        tree = {
            "name": "run",
            "run_root": str(tmp_path / "my runs"),
            "model": {"path": str(model), "dtype": "float32"},
            "prompts": {
                "train": str(tmp_path / "train.jsonl"),
                "heldout": str(tmp_path / "heldout.jsonl"),
                "chat_template": False,
            },
            "algorithm": {"num_steps": 100000, "prompts_per_step": 2},
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
        ({"actor": {"tensor_parallel": 64}}, "actor.tensor_parallel = 64: does not divide"),
        ({"model": {"path": "/nowhere"}}, "model.path = '/nowhere': no such folder"),
        ({"prompts": {"train": "/no.jsonl", "heldout": "/no.jsonl"}}, "/no.jsonl: no such file"),
        ({"launch": {"profile": "nowhere"}}, "launch.profile = 'nowhere': no such profile"),
        ({"run_root": "/proc/1/runs"}, "run_root = '/proc/1/runs'"),
    ],
)
def test_a_run_that_cannot_work_is_refused_and_leaves_nothing(tmp_path, job, changes, message):
    with pytest.raises(ConfigError) as error:
        submit(job(**changes), local=True)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "my runs").exists()


def test_a_local_run_is_recorded_watched_and_ended_whole(tmp_path, job):
    submission = submit(job(), local=True)
    try:
        run_dir = submission.run_dir
        paths = RunPaths(run_dir)
        resolved = read_resolved(paths.config)
        assert resolved.run_dir == run_dir and resolved.run_root.is_absolute()
        launched = record.read(run_dir)
        assert [(each.role, each.tasks) for each in launched.components] == [
            ("rollout", 1), ("actor", 1)]  # fmt: skip
        with pytest.raises(ConfigError, match=r"name = 'run'.*choose another name"):
            submit(job(), local=True)

        folders = [component.folder for component in launched.components]
        until(lambda: all(len(processes(folder, launched.leader)) == 2 for folder in folders))
        tasks = [each for folder in folders for each in processes(folder, launched.leader)]
        assert all(each.find() for each in tasks)
        status = collect(run_dir)
        assert (status.state, status.mode, status.job_id) == ("RUNNING", "local", launched.leader)
        assert json.loads(status.to_json())["components"][1]["role"] == "actor"
        spoken = {"rollout-0", "actor-0"}
        until(lambda: {line.source for line in logs.lines(run_dir)} >= spoken)
    finally:
        cancel(submission.run_dir)
    assert not any(each.find() for each in tasks)
    assert collect(run_dir).state == "CANCELLED"
    cancel(run_dir)  # again: nothing to do, no complaint
    assert "ended with exit code" in next(logs.lines(run_dir)).text
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
