"""Compiled kernels: kept by version where the user says, and never somebody else's."""

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from adversary import needs_another_user

from relax_hpc.errors import ConfigError
from relax_hpc.inference.process import spawn
from relax_hpc.runtime import kernel_cache
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.scratch import COMPILED


def versions(monkeypatch, **installed):
    names = {"cuda": "nvidia-cuda-runtime", "flashinfer": "flashinfer-python"}
    said = {names.get(name, name): version for name, version in installed.items()}

    def version(package):
        if package not in said:
            raise kernel_cache.PackageNotFoundError
        return said[package]

    monkeypatch.setattr(kernel_cache, "version", version)


def kept(root, **environment):
    kernel_cache.keep(environment, root)
    return environment


@pytest.mark.parametrize("changed", ["torch", "triton", "sglang", "cuda", "flashinfer"])
def test_another_version_has_another_folder(tmp_path, monkeypatch, changed):
    now = {"torch": "2", "triton": "3", "sglang": "4", "cuda": "13", "flashinfer": "0.6"}
    names = []
    for each in (now, now, now | {changed: "9"}):
        versions(monkeypatch, **each)
        names.append(kernel_cache.folder_of(tmp_path))
    assert names[0] == names[1] != names[2]


def test_what_the_user_has_said_stays_and_what_we_have_said_does_not(tmp_path):
    root = tmp_path / "kernels"
    ours = f"{tmp_path}/relax-compiled-{os.geteuid()}"
    for said in ({COMPILED: "/mine"}, {"CUDA_CACHE_PATH": "/mine"}, {"TRITON_HOME": "/mine"}):
        assert said.items() <= kept(root, **said).items()
    assert "TRITON_CACHE_DIR" not in kept(root, TRITON_HOME="/mine")
    assert kept(root, **{COMPILED: ours})[COMPILED].startswith(str(root))
    assert kept(None, HOME="/home/me") == {"HOME": "/home/me"}


@pytest.mark.parametrize("place", ["the folder", "the folder of these versions"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_refused_in_one_line(tmp_path, place, mode):
    root = tmp_path / "kernels"
    kept(root)
    planted = root if place == "the folder" else kernel_cache.folder_of(root)
    planted.chmod(mode)
    environment = {}
    with pytest.raises(
        ConfigError, match=f"launch.advanced.kernel_cache = '{root}'.* chmod -R go-w"
    ) as said:
        kernel_cache.keep(environment, root)
    assert environment == {} and "\n" not in str(said.value)
    assert f"{planted}: owner {os.geteuid()}, mode {mode:04o}" in str(said.value)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    root = tmp_path / "kernels"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="would run as that user; choose a folder of your own"):
        kept(root)
    assert list(root.iterdir()) == []


def test_an_engine_is_told_what_its_task_is_told(tmp_path, monkeypatch):
    for name in kernel_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_CACHE_PATH", "/mine")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    kernel_cache.keep(os.environ, tmp_path / "kernels")
    log = tmp_path / "engine.log"
    program = "import os; print(os.environ['SGLANG_CACHE_DIR'], os.environ['CUDA_CACHE_PATH'])"
    with spawn([sys.executable, "-S", "-c", program], log, {}) as engine:
        engine._process.wait(30)
    folder = kernel_cache.folder_of(tmp_path / "kernels")
    assert log.read_text().split() == [f"{folder}/sglang", "/mine"]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_above_that_are_made_are_the_users_alone(tmp_path, umask):
    """S2: a mode counts for the last folder only."""
    root = tmp_path / "above" / "more" / "kernels"
    with permissions.set_umask(umask):
        found = kept(root)
    folders = [*root.parents[:2], root, *map(Path, found.values())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o707])
def test_a_folder_in_whose_place_others_may_put_theirs_is_refused(tmp_path, mode):
    """S2: what is checked is run from a path later."""
    above = tmp_path / "project"
    above.mkdir()
    os.chown(above, -1, 4203)
    for sticky in (0, stat.S_ISVTX):
        above.chmod(mode | sticky)
        for place in (above / "kernels", above / "mine" / "kernels"):
            if sticky:
                kept(place)
                kernel_cache.check(place)
                continue
            for refuse in (kept, kernel_cache.check, kernel_cache.check_above):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                with pytest.raises(ConfigError, match=f"{above} has mode {mode:04o}: others may"):
                    refuse(place)


def test_a_folder_below_another_users_or_behind_their_link_is_refused():
    """S2: the owner of a folder may rename what is in it, sticky bit or not."""
    needs_another_user()
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        theirs, mine, link = (Path(name) / each for each in ("theirs", "mine", "link"))
        for folder in (theirs, mine, theirs / "kernels"):
            folder.mkdir(mode=0o700)
        theirs.chmod(0o1777)
        link.symlink_to(mine)
        kept(link / "kernels")
        os.chown(theirs, 4202, -1)
        os.chown(link, 4202, -1, follow_symlinks=False)
        for root, why in ((theirs / "kernels", "is of user 4202"),
                          (link / "kernels", "is a link of user 4202")):  # fmt: skip
            with pytest.raises(ConfigError, match=f"{root.parent} {why}: others may put"):
                kept(root)
