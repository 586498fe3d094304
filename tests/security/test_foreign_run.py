"""A run directory that others have put in the place of ours, or wrote into, has nothing run."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from adversary import as_nobody, needs_another_user

from relax_hpc.algorithms import table
from relax_hpc.config.job_file import read_resolved, validate
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import preflight, record, submit
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.runs import replay
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.user_programs import place_of
from relax_hpc.runtime.paths import RunPaths

NOBODY = 65534
PART = """\
from pathlib import Path
from relax_hpc.algorithms.part import Advantage
{}
class Mine(Advantage):
    name: str = "mine"

    def of_groups(self, rows):
        return rows.rewards
"""
PROCESSES = {
    "runs.boards.finish": "",
    "runs.boards.follower": "--job-id 7 --controller 1",
    "launch.entry": "actor --start 1",
    "launch.holder": "--side sampling --job-id 7 --controller 1",
    "runs.verdict": "--job-id 7 --what ended",
    "runs.scale.extra_step": "--number 1 --slot 0 --attempt 7.0",
    "runs.scale.scaler": "--job-id 7 --controller 1",
}
"""Modules of a job's script that take a run directory, and what they take besides."""
ALL = """\
import runpy, sys
for line in sys.stdin:
    sys.argv = line.split()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(sys.argv[0], end.code, flush=True)
"""


def made(folder, **changes):
    """A run in a folder, with a record of its launch."""
    tree = {
        "name": "run", "run_root": str(folder), "model": {"path": "m"},
        "prompts": {"train": "t"}, "schedule": {"num_steps": 9},
    } | changes  # fmt: skip
    config, _ = submit.resolve(validate(tree, source="job"))
    paths = RunPaths(config.run_dir)
    submit.make_run_dir(config, paths)
    actor = LaunchedComponent("actor", "7", 1, paths.component("actor"))
    record.write(paths, LaunchRecord("slurm", "7", (actor,), 0.0, None, "n", 1, ()), {})
    return paths


@pytest.fixture
def project():
    """A folder of a group without a sticky bit, as projects have them; nobody is of it, too."""
    needs_another_user()
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "project"
        folder.mkdir()
        os.chown(folder, -1, NOBODY)
        folder.chmod(0o2770)
        yield folder


@pytest.fixture
def with_part(tmp_path):
    """A run whose job names a part of an algorithm, with its copy, and where that leaves a mark."""
    mark, program = tmp_path / "executed", tmp_path / "part.py"
    program.write_text(PART.format(""))
    paths = made(tmp_path, algorithm={"advantage": {"name": f"{program}:Mine"}})
    copy = place_of(read_resolved(paths.config).algorithm.advantage.name)[0]
    copy.write_text(PART.format(f"Path({str(mark)!r}).touch()"))
    table.load.cache_clear()
    yield paths, copy, mark
    table.load.cache_clear()


def test_a_run_that_another_user_put_in_place_of_ours_runs_none_of_its_commands(project):
    """Every process of a job; the end of it would run what the job there says."""
    paths = made(project)
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        mark, theirs = Path(name) / "executed", Path(name) / "theirs"
        theirs.mkdir()
        made(theirs, notify={"command": ["touch", str(mark)]})
        tell = [sys.executable, "-P", "-m", "relax_hpc.runs.boards.finish"]
        subprocess.run([*tell, theirs / "run", "--exit-code", "1"], check=True, timeout=60)
        assert mark.exists(), "so it would"
        mark.unlink()
        tree = json.loads((theirs / "run" / "run.json").read_text())
        (theirs / "run" / "run.json").write_text(json.dumps(tree | {"run_root": str(project)}))
        for left in ("notified.json", "reserve"):
            (theirs / "run" / "control" / left).unlink()
        for path in (theirs.parent, *theirs.parent.rglob("*")):
            path.chmod(0o755)
        as_nobody(f"umask 077; cd {project}; mv run ours; cp -r {theirs}/run run")
        lines = [f"relax_hpc.{module} {paths.root} {rest}\n" for module, rest in PROCESSES.items()]
        answer = subprocess.run(
            [sys.executable, "-P", "-c", ALL], input="".join(lines),
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        said = f"{paths.root}: owner {NOBODY}, mode 2700: is not of user {os.geteuid()}, and what "
        expected = [f"relax_hpc.{module} {said}" for module in PROCESSES]
        assert [line[: len(said) + len(line.split()[0]) + 1] for line in answer.stdout.splitlines()
                ] == expected, answer.stderr  # fmt: skip
        assert not mark.exists()
        assert not (paths.root / "control" / "reserve").exists(), "nothing was written there"


@pytest.mark.parametrize("place", ["programs", "its folder", "its file", "beside it", "run.json"])
def test_no_program_is_imported_that_others_may_have_written(with_part, place):
    paths, copy, mark = with_part
    (copy.parent / "__pycache__").mkdir(mode=0o700, exist_ok=True)
    compiled = copy.parent / "__pycache__" / "helper.cpython-311.pyc"
    compiled.touch(0o600)
    where = {"programs": paths.programs, "its folder": copy.parent, "its file": copy,
             "beside it": compiled, "run.json": paths.config}[place]  # fmt: skip
    mode = where.stat().st_mode
    where.chmod(mode | 0o020)
    with pytest.raises(ConfigError, match=f"program that is run to read it; {where}: .* others"):
        read_resolved(paths.config)
    with pytest.raises(LaunchError, match=f"^{where}: .* others may write there"):
        permissions.check_run(paths)
    where.chmod(mode)
    assert not mark.exists()
    assert read_resolved(paths.config).algorithm.advantage.name == f"{copy}:Mine"
    assert mark.exists()


def test_a_replay_and_an_earlier_job_import_the_copies_of_the_run_under_the_same_rule(with_part):
    paths, copy, mark = with_part
    again, before = paths.replay(1, 1), paths.config_before(2)
    again.root.mkdir(parents=True, mode=0o700)
    tree = json.loads(paths.config.read_text())
    own = {"run_root": str(again.root.parent), "name": again.root.name}
    for path, changes in ((again.config, own), (before, {})):
        path.write_text(json.dumps(tree | changes))
        path.chmod(0o600)
    copy.chmod(0o620)
    for read in ({"path": again.config}, {"path": before, "run_dir": paths.root}):
        with pytest.raises(ConfigError, match=f"{copy}: .* others may write there"):
            read_resolved(**read)
    with pytest.raises(LaunchError, match=f"{copy}: .* others may write there"):
        replay.replay(paths.root, 1)
    copy.chmod(0o600)
    before.chmod(0o620)
    with pytest.raises(ConfigError, match=f"{before}: owner .* others may write there"):
        read_resolved(before, run_dir=paths.root)
    assert not mark.exists()


def test_a_run_of_a_colleague_is_read_where_nothing_of_it_is_run(tmp_path):
    needs_another_user()
    paths = made(tmp_path, reward={"terms": {"a": {"name": "rewards:score"}}})
    for path in (paths.root, *paths.root.rglob("*")):
        os.chown(path, NOBODY, -1)
    assert read_resolved(paths.config).num_steps == 9
    with pytest.raises(LaunchError, match=f"^{paths.root}: owner {NOBODY}"):
        permissions.check_run(paths)


def test_who_submits_below_a_folder_of_others_is_told_how_to_keep_them_out(project):
    said = []
    for folder in (project / "mine" / "run", project / "link" / "deep" / "run"):
        (project / "link").exists() or (project / "link").symlink_to(project / "mine")
        folder.parent.mkdir(parents=True, exist_ok=True)
        preflight.check_run_dir(folder, say=said.append)
        (line,) = said
        assert line.startswith(f"run_root = '{folder.parent}': {project} has mode 2770: others may")
        assert f"chmod +t {project}" in line
        said.clear()
    os.chown(project, -1, os.getgid())  # a group of one
    preflight.check_run_dir(project / "mine" / "run", say=said.append)
    os.chown(project, -1, NOBODY)
    project.chmod(0o3777)
    preflight.check_run_dir(project / "mine" / "run", say=said.append)
    assert said == []
    project.chmod(0o757)
    preflight.check_run_dir(project / "mine" / "run", say=said.append)
    assert len(said) == 1
