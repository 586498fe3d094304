"""A run goes on with the programs that it began with, whatever their owner makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest
from job_trees import job_of

from relax_hpc.algorithms import table
from relax_hpc.config import programs
from relax_hpc.config.job_file import read_resolved, validate
from relax_hpc.data import rows as files
from relax_hpc.errors import ConfigError, ends_of
from relax_hpc.launch import submit
from relax_hpc.runs import resume
from relax_hpc.runtime.files import permissions, user_programs
from relax_hpc.runtime.files.user_programs import place_of
from relax_hpc.runtime.paths import RunPaths

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
    job = job_of(
        run_root=str(tmp_path), prompts__train=["rows.py:Rows", "data.jsonl"],
        reward__terms={"a": {"name": "reward.py:score"}, "b": {"name": "gsm8k"}},
        rollout__environment="world.py:World", eval__heldout__path="rows.py:Rows",
        algorithm__advantage={"name": "part.py:Mine", "scale": 3.0},
    )  # fmt: skip
    with permissions.set_umask(permissions.UMASKS["none"]):  # as the command has it
        config, _ = submit.resolve(job)
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
        "import sys\nfrom relax_hpc.runtime.files.user_programs import import_place\n"
        "assert 'wave' not in sys.modules; print(import_place('pack.rewards:score')())"
    )
    command = [sys.executable, "-P", "-c", program]
    said = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=60)
    assert said.stdout == "1\n", said.stderr


def test_a_copy_is_run_though_the_program_changed_and_finds_its_data_where_it_was(tmp_path, mine):
    _, config = submitted(tmp_path)
    for path in mine.glob("*.py"):
        path.write_text("raise RuntimeError('changed meanwhile')\n")
    (mine / "table.txt").write_text("0.25")
    program = (
        "import random, sys\nfrom relax_hpc.runtime.files.user_programs import import_place\n"
        "sys.path.insert(0, '.')  # as where a command is run\n"
        "print(import_place(sys.argv[1])(None), import_place(sys.argv[2]).__name__)"
    )
    names = config.reward.terms["a"].name, config.algorithm.advantage.name
    command = [sys.executable, "-P", "-c", program, *names]
    said = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=60)
    assert said.stdout == "1.25 Mine\n", said.stderr


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_to_look_at_a_run_of_another_user_nothing_of_theirs_is_run(tmp_path, mine):
    paths, config = submitted(tmp_path)
    copy = place_of(config.algorithm.advantage.name)[0]
    copy.write_text(f"from pathlib import Path\nPath({str(tmp_path)!r}, 'executed').touch()\n")
    table.load.cache_clear()
    os.chown(paths.config, 65534, -1)
    with pytest.raises(ConfigError, match=f"^{paths.config}: names a program .* owner 65534"):
        read_resolved(paths.config)
    assert not (tmp_path / "executed").exists()
    tree = json.loads(paths.config.read_text())
    tree["algorithm"]["advantage"] = {"name": "grpo"}
    paths.config.write_text(json.dumps(tree))
    assert read_resolved(paths.config).algorithm.advantage.name == "grpo"


def test_an_error_that_fits_is_told_as_it_is_and_of_a_longer_one_both_ends_are():  # U1
    assert ends_of("0123456789" * 2, 20) == "0123456789" * 2
    assert ends_of("0123456789" * 3, 20) == "01234 ... 0123456789"


PROGRAM = """
import time
class Squares:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        if index == 7:
            raise OSError("no such disk")
        return {"prompt": f"{index}*{index}=", "answer": str(index**2)}

class Endless:
    pass

class SlowLength:
    def __len__(self):
        time.sleep(5)

class SlowRow:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        time.sleep(5)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


def test_rows_are_asked_of_it_by_number_and_a_slice_may_stand_behind_it(program):
    rows = files.open_rows(Path(f"{program}:Squares"))
    assert len(rows) == sum(rows.blocks.sizes) == 600
    assert rows[599].fields == {"prompt": "599*599=", "answer": "358801"}
    assert rows.where(12) == f"{program}:Squares, row 12"
    some = files.open_rows(Path(f"{program}:Squares[100:-100]"))
    assert (len(some), some[0].fields["answer"]) == (400, "10000")
    assert files.paths_of(Path(f"{program}:Squares")) == [program], "the file that it depends on"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("mine.py:Endless", r"mine\.py:Endless: cannot be made: TypeError: .*len"),
        ("mine.py:None_such", r"mine\.py:None_such: cannot be made: AttributeError"),
        ("gone.py:Rows", r"gone\.py:Rows: cannot be made: FileNotFoundError"),
        ("mine.py:Squares", "Squares, row 7: cannot be made: OSError: no such disk"),
    ],
)
def test_what_it_does_wrong_is_said_with_its_place(program, rows, said):
    with pytest.raises(ConfigError, match=said):
        files.open_rows(program.with_name(rows))[7]


def test_a_length_or_a_first_row_that_takes_too_long_is_ended(program, monkeypatch):
    monkeypatch.setattr(user_programs, "PATIENCE_S", 0.2)
    monkeypatch.setattr(user_programs, "_TELL_S", 0.1)
    said = r": cannot be made: TimeoutError: making it takes longer than 0\.2 s \(mine\.py:\d+\)"
    with pytest.raises(ConfigError, match=rf"mine\.py:SlowLength{said}"):
        files.open_rows(Path(f"{program}:SlowLength"))
    rows = files.open_rows(Path(f"{program}:SlowRow"))
    with pytest.raises(ConfigError, match=rf"mine\.py:SlowRow, row 2{said}"):
        rows[2]
