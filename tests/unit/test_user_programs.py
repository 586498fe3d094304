"""A run goes on with the programs that it began with, whatever their owner makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest

import relax_hpc
from relax_hpc import permissions
from relax_hpc.algorithms import plugin
from relax_hpc.config import programs
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import read_resolved, validate
from relax_hpc.launch import submit
from relax_hpc.paths import RunPaths
from relax_hpc.runs import resume
from relax_hpc.user_programs import place_of

REWARD = """\
import random
from pathlib import Path
import helper, installed

def score(sample):
    return helper.VALUE + float((Path(__file__).parent / "table.txt").read_text())
"""
PART = """\
from relax_hpc.algorithms.part import Advantage

class Mine(Advantage):
    name: str = "mine"
    scale: float = 1.0

    def of_groups(self, rows):
        return rows.rewards * {}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder of programs; `random.py` in it must not take the place of Python's."""
    folder = tmp_path / "mine"
    (folder / "installed").mkdir(parents=True)
    files = {
        "reward.py": REWARD, "helper.py": "import deeper\nVALUE = deeper.VALUE\n",
        "deeper.py": "import helper\nVALUE = 1\n", "table.txt": "0.5", "unused.py": "raise 1\n",
        "random.py": "raise ImportError\n", "installed/__init__.py": "", "part.py": PART.format(2),
        "rows.py": "Rows = list\n", "world.py": "World = object\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def submitted(tmp_path):
    """The job that a run directory has of a job file that names them."""
    tree = {
        "name": "run", "run_root": str(tmp_path), "model": {"path": "m"},
        "prompts": {"train": ["rows.py:Rows", "data.jsonl"]}, "schedule": {"num_steps": 9},
        "reward": {"terms": {"a": {"name": "reward.py:score"}, "b": {"name": "gsm8k"}}},
        "rollout": {"environment": "world.py:World"},
        "algorithm": {"advantage": {"name": "part.py:Mine", "scale": 3.0}},
        "eval": {"heldout": {"path": "rows.py:Rows"}},
    }  # fmt: skip
    config, _ = submit.resolve(validate(tree, source="job"))
    paths = RunPaths(config.run_dir)
    submit.make_run_dir(config, paths)
    return paths, read_resolved(paths.config)


def test_the_programs_of_a_job_are_copied_with_what_they_import(tmp_path, mine):
    paths, config = submitted(tmp_path)
    named = [
        config.reward.terms["a"].name, config.algorithm.advantage.name, config.rollout.environment,
        str(config.prompts.train[0]), str(config.eval["heldout"].path[0]),
    ]  # fmt: skip
    assert [place_of(name)[0].parent.parent for name in named] == [paths.programs] * 5
    assert named[3] == named[4], "one copy of one file"
    assert config.reward.terms["b"].name == "gsm8k"
    assert config.prompts.train[1] == mine / "data.jsonl"
    beside = {path.name for path in place_of(named[0])[0].parent.iterdir()}
    assert beside == {"reward.py", "helper.py", "deeper.py", ".origin"}
    assert {path.stat().st_mode & 0o077 for path in paths.programs.rglob("*")} == {0}


def test_a_package_beside_the_command_is_found_and_no_module_there_takes_the_place_of_pythons(mine):
    (mine / "pack").mkdir()
    (mine / "wave.py").write_text("raise ImportError\n")  # one that nobody has imported before
    (mine / "pack" / "rewards.py").write_text(
        "import wave\ndef score(): return wave.WAVE_FORMAT_PCM"
    )
    program = (
        "import sys\nfrom relax_hpc.user_programs import imported\n"
        "assert 'wave' not in sys.modules; print(imported('pack.rewards:score')())"
    )
    command = [sys.executable, "-P", "-c", program]
    said = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=60)
    assert said.stdout == "1\n", said.stderr


def test_no_process_of_a_run_looks_for_modules_in_the_folder_of_the_command():
    package = Path(relax_hpc.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if not path.is_relative_to(package / "bench")
        for line in path.read_text().splitlines()
        if '"-m", ' in line and '"-P", "-m", ' not in line
    ]
    assert not found


def test_a_job_of_fine_tuning_has_copies_too(tmp_path, mine):
    tree = {
        "name": "run", "run_root": str(tmp_path), "model": {"path": "m"},
        "sft": {"train": "rows.py:Rows", "heldout": "data.jsonl", "batch_size": 2, "num_steps": 3},
    }  # fmt: skip
    config, _ = submit.resolve(validate(tree, source="job"))
    copied = programs.keep(config, tmp_path / "programs").sft
    assert place_of(str(copied.train))[0].read_text() == (mine / "rows.py").read_text()
    assert place_of(str(copied.train))[0].is_relative_to(tmp_path / "programs")
    assert copied.heldout == mine / "data.jsonl"


def test_a_copy_is_run_though_the_program_changed_and_finds_its_data_where_it_was(tmp_path, mine):
    _, config = submitted(tmp_path)
    for path in mine.glob("*.py"):
        path.write_text("raise RuntimeError('changed meanwhile')\n")
    (mine / "table.txt").write_text("0.25")
    program = (
        "import random, sys\nfrom relax_hpc.user_programs import imported\n"
        "sys.path.insert(0, '.')  # as where a command is run\n"
        "print(imported(sys.argv[1])(None), imported(sys.argv[2]).__name__)"
    )
    names = config.reward.terms["a"].name, config.algorithm.advantage.name
    command = [sys.executable, "-P", "-c", program, *names]
    said = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=60)
    assert said.stdout == "1.25 Mine\n", said.stderr


def test_parts_of_an_algorithm_are_those_of_the_copy(tmp_path, mine):
    paths, config = submitted(tmp_path)
    (mine / "part.py").write_text(PART.format(5))
    again = read_resolved(paths.config).algorithm.advantage
    assert again.scale == config.algorithm.advantage.scale == 3.0
    text = place_of(again.name)[0].read_text()
    assert "* 2" in text and text == PART.format(2)


def test_nothing_of_a_run_that_others_may_write_is_run_to_resume_it(tmp_path, mine):
    paths, config = submitted(tmp_path)
    copy = place_of(config.algorithm.advantage.name)[0]
    copy.write_text(f"from pathlib import Path\nPath({str(tmp_path)!r}, 'executed').touch()\n")
    paths.programs.chmod(0o722)
    with pytest.raises(permissions.LaunchError, match=r"programs: owner .* others may write"):
        resume.resume(paths.root)
    assert not (tmp_path / "executed").exists()


def test_who_resumes_a_run_is_told_of_programs_that_changed_since(tmp_path, mine, monkeypatch):
    slurm = fake_slurm.make(tmp_path, monkeypatch)
    paths, said = RunPaths(slurm.run_dir), []
    names = {"a": {"name": "reward.py:score"}, "b": {"name": "rows.py:score"}}
    tree = json.loads(paths.config.read_text()) | {"reward": {"terms": names}}
    programs.keep(submit.resolve(validate(tree, source="job"))[0], paths.programs)
    slurm.says("7+0|FAILED", "7+1|FAILED")
    (mine / "unused.py").write_text("raise 2\n")
    (mine / "rows.py").unlink()
    assert resume.resume(paths.root, say=said.append).number == 2
    assert said == []
    slurm.says(*(f"{job}+{k}|FAILED" for job in (7, 9) for k in (0, 1)))
    (mine / "helper.py").write_text("VALUE = 7\n")
    (mine / "reward.py").write_text(REWARD.replace("helper.VALUE", "0"))
    assert resume.resume(paths.root, say=said.append).number == 3
    assert said == [
        f"{mine / name}: has changed since; this run keeps its copy. To use it, submit a run of "
        "another name"
        for name in ("helper.py", "reward.py")
    ]


def test_a_job_without_programs_has_no_folder_of_them(tmp_path):
    tree = {"name": "run", "run_root": str(tmp_path), "model": {"path": "m"},
            "prompts": {"train": "t"}, "schedule": {"num_steps": 9}}  # fmt: skip
    config, _ = submit.resolve(validate(tree, source="job"))
    assert programs.keep(config, tmp_path / "programs") == config
    assert not (tmp_path / "programs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_to_look_at_a_run_of_another_user_nothing_of_theirs_is_run(tmp_path, mine):
    paths, config = submitted(tmp_path)
    copy = place_of(config.algorithm.advantage.name)[0]
    copy.write_text(f"from pathlib import Path\nPath({str(tmp_path)!r}, 'executed').touch()\n")
    plugin.load.cache_clear()
    os.chown(paths.config, 65534, -1)
    with pytest.raises(ConfigError, match=f"^{paths.config}: names a program .* owner 65534"):
        read_resolved(paths.config)
    assert not (tmp_path / "executed").exists()
    tree = json.loads(paths.config.read_text())
    tree["algorithm"]["advantage"] = {"name": "grpo"}
    paths.config.write_text(json.dumps(tree))
    assert read_resolved(paths.config).algorithm.advantage.name == "grpo"
