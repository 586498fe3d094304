"""Paths in a job file: what stands there, and the home of who runs it."""

import os
import pwd
import shutil
from pathlib import Path

import pytest

from relax_hpc.config import job_file
from relax_hpc.config.job_file import validate
from relax_hpc.errors import ConfigError
from relax_hpc.launch import cluster, known_runs, profiles

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


def no_home(patch):
    def home(*_):
        raise KeyError("uid not found")

    for name in ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME"):
        patch.delenv(name, raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr(pwd, "getpwuid", home)


def test_without_a_home_or_an_entry_for_the_user_a_job_is_checked_and_remembered_nowhere(
    tmp_path, monkeypatch
):  # O6
    no_home(monkeypatch)
    assert profiles.chosen(None) is None and profiles.chosen("local") == "local"
    assert "nodes" in profiles.load("local").model_dump()
    with pytest.raises(ConfigError, match="no such profile; use a path, or one of example, local"):
        profiles.chosen("nowhere")
    known_runs.remember(tmp_path)
    assert known_runs.find_runs("run") == []
    assert cluster._me() == str(os.geteuid())


def test_a_tilde_without_a_home_is_refused_with_its_key(monkeypatch):  # O6
    no_home(monkeypatch)
    with pytest.raises(ConfigError, match=r"model.path = '~/m': no home folder is known for ~"):
        validate({"model": {"path": "~/m"}}, source="test")
    monkeypatch.setenv("RELAX_RUN_ROOT", "~/runs")
    with pytest.raises(ConfigError, match=r"RELAX_RUN_ROOT = '~/runs': no home folder"):
        known_runs.default_root()
    with pytest.raises(ConfigError, match="you have no home folder here"):
        profiles.folder()


def test_a_folder_whose_name_is_no_text_is_refused_in_a_line(refused, job, tmp_path):  # O1
    odd = Path(os.fsdecode(b"r\xe9sum\xe9"))
    odd.mkdir()
    try:
        shutil.copy("job.toml", odd)
        os.chdir(odd)
        said = refused("check", "job.toml", "--local")
    finally:
        os.chdir(tmp_path)
    assert "r\\udce9sum\\udce9: its name is no UTF-8 text" in said and "\n" not in said
    with pytest.raises(ConfigError, match=r"--set run_root=.*UTF-8 text"):
        job_file.load(Path("job.toml"), [f"run_root={odd}"])
