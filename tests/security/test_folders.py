"""Code that a task runs is its owner's alone, or it does not run; secrets, temporary folders."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from adversary import as_nobody, bomb, needs_another_user
from typer.testing import CliRunner

from relax_hpc.cli.bench import bus
from relax_hpc.cli.bench.commands import bench
from relax_hpc.errors import LaunchError
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.files.scratch import COMPILED, scratch_folder, use_private_folder
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    """A run directory where bombs stand in place of every file that a launcher might read."""
    paths = RunPaths(tmp_path / "run")
    with permissions.set_umask(0o077):
        paths.component("actor").mkdir(parents=True)
        paths.programs.mkdir()
        for name in ("job_submitted.pkl", "job_0_result.pkl", "job_0_done"):
            (paths.component("actor") / name).write_bytes(bomb(tmp_path / "executed"))
        paths.config.write_bytes(bomb(tmp_path / "executed"))
    return paths


def check_run(paths):
    """As a task of the actor does."""
    permissions.check_run(paths, paths.submission, paths.component("actor"))


def run_task(paths):
    return subprocess.run(
        [sys.executable, "-m", "relax_hpc.launch.entry", paths.root, "actor", "--start", "1"],
        env=os.environ | {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "job",
                          "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("mode", [0o720, 0o702])
@pytest.mark.parametrize("place", [".", "submission", "submission/actor", "programs", "run.json"])
def test_a_folder_that_others_may_write_is_refused(paths, place, mode):
    check_run(paths)
    (paths.root / place).chmod(mode)
    with pytest.raises(LaunchError) as error:
        check_run(paths)
    where = (paths.root / place).resolve()
    assert f"{where}: owner {os.geteuid()}, mode {mode:04o}: others" in str(error.value)
    assert f"chmod -R go-w {where}" in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("place", [".", "submission", "submission/actor", "programs", "run.json"])
def test_a_folder_of_another_user_is_refused(paths, place):
    os.chown(paths.root / place, 65534, -1)
    with pytest.raises(LaunchError, match=r"owner 65534, mode 0[67]00: is not of user 0"):
        check_run(paths)


@pytest.mark.parametrize("place", ["submission", "run.json"])
def test_a_task_executes_nothing_that_others_may_have_written(paths, place, tmp_path):
    (paths.root / place).chmod(0o777)
    answer = run_task(paths)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and f"{place}: owner" in answer.stderr
    assert not (tmp_path / "executed").exists()


def test_what_lies_in_the_run_is_named_or_parsed_and_never_executed(paths, tmp_path):
    assert run_task(paths).returncode == 0, "there is a mark of its end, whatever is in it"
    (paths.component("actor") / "job_0_done").unlink()
    answer = run_task(paths)
    assert answer.returncode == 1 and f"{paths.config}: is not" in answer.stderr
    assert not (tmp_path / "executed").exists()


def test_a_secret_is_made_once_and_its_owners_alone(tmp_path):
    path = tmp_path / "secret"
    with permissions.set_umask(0):
        made = RunSecret.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        RunSecret.create(path)
    read = RunSecret.read(path)
    assert read.engine_token("rollout-0", "1.0-1-1") == made.engine_token("rollout-0", "1.0-1-1")
    others = {
        made.engine_token(*each) for each in (("rollout-0", "1.0-1-2"), ("rollout-1", "1.0-1-1"))
    }
    assert len(others | {read.engine_token("rollout-0", "1.0-1-1")}) == 3
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(LaunchError, match=f"mode {mode:04o}, but a secret is its owner's"):
            RunSecret.read(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(LaunchError, match="is not a secret"):
        RunSecret.read(path)
    assert path.read_text() not in repr(made) and repr(made._key) not in repr(made)


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path):
    """The next one for the same purpose removes it, on this node and of this user only."""
    hold = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from relax_hpc.runtime.files.scratch import scratch_folder\n"
        "with scratch_folder(sys.argv[2], Path(sys.argv[1])) as folder:\n"
        "    (folder / 'token').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
    )

    def start(purpose):
        process = subprocess.Popen(
            [sys.executable, "-c", hold, tmp_path, purpose], stdout=subprocess.PIPE, text=True
        )
        return process, Path(process.stdout.readline().strip())

    begun = [start("engine"), start("engine"), start("bench")]
    (killed, left), (living, kept), (other, others) = begun
    for process in (killed, other):
        process.kill()
        process.wait()
    foreign = [
        tmp_path / left.name.replace("relax-engine-", "relax-engine-another"),  # node
        tmp_path / "relax-engine-mine",
        tmp_path / "relax-engine",
    ]
    for folder in foreign:
        folder.mkdir()
    aliased = tmp_path / left.name.rsplit("-", 1)[0]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(f"{aliased}-link").symlink_to(elsewhere)
    try:
        with scratch_folder("engine", tmp_path) as own:
            assert own.is_dir() and stat.S_IMODE(own.stat().st_mode) == 0o700
            assert not left.exists()
            assert (kept / "token").exists() and (others / "token").exists()
            assert all(folder.is_dir() for folder in foreign) and elsewhere.is_dir()
        assert not own.exists()
    finally:
        living.kill()
        living.wait()


def where_compiled(temporary, monkeypatch, said=None):
    """Where torch's compiler keeps what it made, and that folder's mode, within a task."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = {} if said is None else {COMPILED: said}
    with use_private_folder(environment):
        found = Path(environment[COMPILED])
        return found, stat.S_IMODE(found.stat().st_mode) if found.exists() else None


@pytest.mark.parametrize("planted", ["open to others", "open to the group", "a link", "a file"])
def test_a_planted_folder_of_compiled_programs_is_not_used(tmp_path, monkeypatch, caplog, planted):
    folder, _ = where_compiled(tmp_path, monkeypatch)
    if planted.startswith("open"):
        folder.chmod(0o777 if planted == "open to others" else 0o770)
    else:
        folder.rmdir()
        if planted == "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.touch()
    used, mode = where_compiled(tmp_path, monkeypatch)
    assert used != folder and used.parent == tmp_path and mode == 0o700
    assert not used.exists(), "it goes with the task"
    assert f"{folder}: is not this user's alone" in caplog.text


def test_a_folder_that_another_user_made_first_is_not_used(tmp_path, monkeypatch):
    needs_another_user()
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:  # others may pass there
        Path(name).chmod(0o1777)
        folder = Path(name) / f"relax-compiled-{os.geteuid()}"
        as_nobody(f"umask 077; mkdir {folder}")
        used, mode = where_compiled(Path(name), monkeypatch)
        assert used != folder and mode == 0o700


def test_a_task_has_torch_keep_what_it_compiles_in_a_folder_of_its_own(tmp_path):
    """Asks torch itself, with the umask of a careless colleague."""
    run = tmp_path / "run"
    with permissions.set_umask(0o077):
        RunPaths(run).component("actor").mkdir(parents=True)
    task = (
        "from relax_hpc.launch import entry\n"
        "def role(*_):\n"
        "    from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "    print(cache_dir())\n"
        "entry.main(role)\n"
    )
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "job",
             "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}  # fmt: skip
    inherited = os.environ | {COMPILED: str(tmp_path / "torchinductor_me")}  # said by torch itself
    answer = subprocess.run(
        ["sh", "-c", 'umask 000; exec "$@"', "sh", sys.executable, "-c", task, run, "actor",
         "--start", "1"],
        env=inherited | local | {"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    folder = Path(answer.stdout.strip())
    assert folder == tmp_path / f"relax-compiled-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_benchmark_compiles_in_that_folder_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(COMPILED, str(tmp_path / "torchinductor_me"))  # what it is set to is undone
    found = []
    monkeypatch.setattr(bus, "measure", lambda *_: found.append(os.environ[COMPILED]) or [])
    answer = CliRunner().invoke(bench, ["bus"])
    assert answer.exit_code == 0, answer.output
    assert found == [str(tmp_path / f"relax-compiled-{os.geteuid()}")]


def test_nothing_is_kept_in_a_temporary_folder_where_others_may_replace_it(tmp_path, monkeypatch):
    """S2: as kernels are not; without a sticky bit a folder that is ours can be renamed."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("engine") as folder:
        assert not folder.is_relative_to(tmp_path)
    assert not where_compiled(tmp_path, monkeypatch)[0].is_relative_to(tmp_path)
    tmp_path.chmod(0o1777)
    with scratch_folder("engine") as folder:
        assert folder.parent == tmp_path
