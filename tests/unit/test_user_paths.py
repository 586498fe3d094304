"""Paths in a job file: what stands there, and the home of who runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc import job_file
from relax_hpc.errors import ConfigError

DEMO = Path(__file__).parents[2] / "jobs" / "demo.toml"


def test_a_path_may_begin_with_the_home_of_who_runs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = job_file.load(DEMO, ["run_root=~/runs", "model.path=~/model", "prompts.train=~/t"])
    assert config.run_root == tmp_path / "runs" and config.model.path == tmp_path / "model"
    assert list(config.prompts.train) == [tmp_path / "t"]
    assert job_file.load(DEMO, ["run_root=a~b"]).run_root == Path("a~b")


def test_variables_are_refused_and_not_taken_for_names():
    with pytest.raises(ConfigError, match=r"run_root = '\$HOME/r': variables are not put in"):
        job_file.load(DEMO, ["run_root=$HOME/r"])


def test_a_folder_that_was_removed_is_named_in_one_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys; from relax_hpc.cli.main import main; os.rmdir(os.getcwd()); "
        f"sys.argv[1:] = ['check', '{DEMO}']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "the folder that this is run in was removed; cd to one that is there\n"
