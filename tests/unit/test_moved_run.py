"""Runs that go on: where they were moved, with what they began with, and beside nobody else."""

import json
import shutil
from pathlib import Path

import fake_slurm
import pytest
from job_trees import job_of

from relax_hpc.config.job_file import load, read_resolved
from relax_hpc.config.model import learning_rate
from relax_hpc.errors import ConfigError
from relax_hpc.launch import record, states, submit
from relax_hpc.runs import changes, replay
from relax_hpc.runs import resume as resuming
from relax_hpc.runs.resume import _check_inputs, resume
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.user_programs import place_of
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


@pytest.fixture
def made(tmp_path):
    """The directory of a run with a reward of its own, and a set of prompts in it."""
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    made = job_of(
        run_root=f"{tmp_path}/runs", prompts__train=f"{tmp_path}/runs/run/rows.jsonl",
        reward__name=f"{tmp_path}/mine.py:score",
        eval__heldout__path=f"{tmp_path}/runs/runner/rows.jsonl",
    )  # fmt: skip
    config, _ = submit.resolve(made)
    submit.make_run_dir(config, RunPaths(config.run_dir))
    return config.run_dir


def test_what_lies_in_a_run_that_was_moved_is_found_where_it_lies_now(tmp_path, made):
    (tmp_path / "elsewhere").mkdir()
    there = made.rename(tmp_path / "elsewhere" / "second")
    config = read_resolved(RunPaths(there).config)
    assert (config.run_dir, config.name) == (there, "second")
    program, _ = place_of(config.reward.name)
    assert program.is_relative_to(there) and program.is_file()
    assert config.prompts.train == [there / "rows.jsonl"]
    assert config.eval["heldout"].path == [tmp_path / "runs/runner/rows.jsonl"], "of another run"


@pytest.mark.parametrize("asked", [{"decay": "cosine"}, {"decay": "sqrt"}, {"decay_steps": 3}])
def test_a_run_of_before_a_decay_to_nowhere_was_refused_goes_on_at_its_constant_rate(made, asked):
    path = RunPaths(made).config
    stored = read_json(path)
    stored["actor"]["optimizer"] |= asked
    write_json(path, stored)
    found = read_resolved(path).actor.optimizer
    assert {learning_rate(found, step, 9) for step in range(1, 10)} == {found.lr}
    stored["actor"]["optimizer"]["final_lr_fraction"] = 0.5
    write_json(path, stored)
    meant = read_resolved(path).actor.optimizer
    assert {key: getattr(meant, key) for key in asked} == asked


def without_advanced(tree):
    """The tables of a job as they were before some keys became advanced."""
    found = {}
    for key, value in tree.items():
        inside = without_advanced(value) if isinstance(value, dict) else value
        found |= inside if key == "advanced" else {key: inside}
    return found


def test_the_job_of_a_run_of_before_keys_became_advanced_is_read_as_it_was(tmp_path):
    job = job_of(
        run_root=str(tmp_path), algorithm__preset="ppo", critic={"advanced": {"value_clip": 0.5}},
        engines__judge__advanced__drain_slow=True, engines__rollout__advanced__hang_timeout_s=9,
        launch__advanced={"share": "group", "idle_s": 7}, actor__advanced__attention="sdpa",
    )  # fmt: skip
    paths = RunPaths(job.run_dir)
    write_json(paths.config, without_advanced(job.model_dump(mode="json")))
    assert read_resolved(paths.config) == job


def test_such_a_run_is_resumed_and_what_it_was_before_shows_only_what_was_changed(slurm):
    slurm.leaves(1)
    paths = RunPaths(slurm.run_dir)
    stored = without_advanced(read_json(paths.config))
    write_json(paths.config, stored)
    resume(slurm.run_dir, overrides=["launch.advanced.peer_timeout_s=77"], ended=True)
    write_json(paths.config_before(2), stored)  # as one that was resumed then has it
    [changed] = changes.of_run(paths)
    assert changed.keys == {"launch.advanced.peer_timeout_s": (1800, 77)}


def test_a_run_that_is_reached_by_a_link_keeps_its_name_and_place(tmp_path, made):
    (tmp_path / "latest").symlink_to(made)
    assert read_resolved(RunPaths(tmp_path / "latest").config).run_dir == made
    (tmp_path / "scratch").symlink_to(made.parent)
    assert read_resolved(RunPaths(tmp_path / "scratch" / "run").config).run_dir == made
    there = made.rename(tmp_path / "second")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("second")
    assert read_resolved(RunPaths(tmp_path / "latest").config).run_dir == there


def test_a_copy_beside_the_run_is_a_run_of_its_own(tmp_path, made):
    copied = tmp_path / "copied"
    write_json(RunPaths(copied).config, read_json(RunPaths(made).config))
    assert read_resolved(RunPaths(copied).config).run_dir == copied


def test_a_name_that_no_run_can_have_is_refused_by_name(tmp_path, made):
    there = made.rename(tmp_path / "run (old)")
    with pytest.raises(ConfigError, match=r"run \(old\): is no name of a run, .*; rename it"):
        read_resolved(RunPaths(there).config)


def test_a_run_that_was_moved_is_resumed_where_it_is_and_leaves_nothing_where_it_was(
    tmp_path, slurm
):
    there = slurm.run_dir.rename(tmp_path / "second")
    slurm.says()
    (RunPaths(there).submission / "7_exit_code").write_text("1\n")
    started = resume(there)
    assert started.run_dir == there and not slurm.run_dir.exists()
    paths = RunPaths(there)
    script = (paths.submission / "9_submission.sh").read_text()
    assert str(there) in script and str(slurm.run_dir) not in script
    launches = record.read(there).all
    assert len(launches) == 2
    assert {each.folder for one in launches for each in one.components} == {
        paths.component("rollout"), paths.component("actor"),
    }  # fmt: skip


def test_a_replay_is_found_where_it_lies_and_runs_the_programs_of_its_run(made):
    paths = RunPaths(made)
    config = read_resolved(paths.config)
    folder = replay._make(paths, config, replay.Replay(made, 1, 1, None))
    again = read_resolved(folder.config)
    assert again.run_dir == folder.root
    assert again.reward == config.reward


MEANWHILE = "was resumed meanwhile, as job 9; nothing was started"


@pytest.fixture
def failed(slurm):
    slurm.leaves(1)
    return slurm


def by_another(slurm):
    """What a process does that resumes the run and exits: its claim is that of nobody alive."""
    assert resume(slurm.run_dir, ended=True).job_id == "9"
    paths = RunPaths(slurm.run_dir)
    claim = paths.launch_claim(record.read(slurm.run_dir).number)
    write_json(claim, json.loads(claim.read_text()) | {"pid": 2**22 - 3, "start_time": 1.0})


def meanwhile(monkeypatch, module, name, act):
    """Calls `act` once, when `name` of a module is called first."""
    real, acts = getattr(module, name), [act]

    def held_up(*args):
        if acts:
            acts.pop()()
        return real(*args)

    monkeypatch.setattr(module, name, held_up)


def started(slurm):
    paths = RunPaths(slurm.run_dir)
    return (
        [each.number for each in record.read(slurm.run_dir).all],
        sorted(path.name for path in paths.control.glob("launch-*.json")),
        len(slurm.asked("sbatch")),
    )


def test_who_is_sure_starts_nothing_beside_a_launch_that_came_after_the_look(failed, monkeypatch):
    """Nor is there a claim of a third for a moment: the job of the second would end of it."""
    claimed, once = [], record.write_json_once
    monkeypatch.setattr(
        record, "write_json_once", lambda path, mine: claimed.append(path.name) or once(path, mine)
    )
    meanwhile(monkeypatch, resuming, "_compare_programs", lambda: by_another(failed))
    with pytest.raises(ConfigError, match=MEANWHILE) as error:
        resume(failed.run_dir, ended=True)
    assert f"relax-hpc status {failed.run_dir}" in str(error.value)
    assert started(failed) == ([2, 1], ["launch-2.json"], 1)
    assert claimed == ["launch-2.json"]


def test_a_claim_is_given_back_if_a_launch_is_recorded_while_it_is_made(failed, monkeypatch):
    """The one who was thought dead, on another node, was only held up."""
    paths = RunPaths(failed.run_dir)
    dead = {"time": 0.0, "node": "elsewhere", "pid": 1, "start_time": 1.0}
    write_json(paths.launch_claim(2), dead)

    def wakes():
        fields = json.loads(paths.launch_record.read_text())
        first = {key: fields[key] for key in ("mode", "leader", "components", "time", "controller")}
        write_json(paths.launch_record, fields | {"number": 2, "leader": "9", "earlier": [first]})

    meanwhile(monkeypatch, record, "write_json_once", wakes)
    with pytest.raises(ConfigError, match=MEANWHILE):
        resume(failed.run_dir, ended=True)
    assert started(failed) == ([2, 1], ["launch-2.json"], 0)


@pytest.fixture
def begun(job):
    """The job of a run that has looked at its prompts, and its directory."""
    paths = RunPaths(job / "run")
    paths.prompt_rows(0).parent.mkdir(parents=True)
    write_json(paths.prompt_rows(0), {"num_rows": {"prompts.train": 4}})
    return load(Path("job.toml")), paths


def test_a_run_goes_on_with_the_data_it_was_begun_with(begun):
    config, paths = begun
    _check_inputs(config, paths)
    paths.prompt_rows(0).unlink()  # it did not get so far
    _check_inputs(config, paths)


def test_other_rows_and_what_is_gone_are_refused_at_once(begun):
    config, paths = begun
    train = Path("train.jsonl")
    row = train.read_text(encoding="utf-8")
    train.write_text(2 * row, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts.train: has 8 rows, the run was begun with 4"):
        _check_inputs(config, paths)
    train.unlink()
    with pytest.raises(ConfigError, match=r"train.jsonl.*: no such file"):
        _check_inputs(config, paths)
    train.write_text(row, encoding="utf-8")
    shutil.move("model", "gone")
    with pytest.raises(ConfigError, match=r"model.path = .*: no such folder"):
        _check_inputs(config, paths)
