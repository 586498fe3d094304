"""A run directory that was moved, renamed, or is reached by another path."""

import fake_slurm
import pytest

from relax_hpc.engines.megatron.optimizer.learning_rate import learning_rate
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import read_resolved, validate
from relax_hpc.launch import record, states, submit
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.runs import replay
from relax_hpc.runs.resume import resume
from relax_hpc.user_programs import place_of


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


@pytest.fixture
def made(tmp_path):
    """The directory of a run with a reward of its own, and a set of prompts in it."""
    (tmp_path / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    tree = {
        "name": "run", "run_root": str(tmp_path / "runs"), "model": {"path": "m"},
        "prompts": {"train": str(tmp_path / "runs/run/rows.jsonl")}, "schedule": {"num_steps": 9},
        "reward": {"name": f"{tmp_path}/mine.py:score"},
        "eval": {"heldout": {"path": str(tmp_path / "runs/runner/rows.jsonl")}},
    }  # fmt: skip
    config, _ = submit.resolve(validate(tree, source="job"))
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
