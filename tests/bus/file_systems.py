"""File systems to fill, to forbid and to limit; each is unmounted again, and nothing else is."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest


def _run(*words):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)


def _program(name):
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def mounted(folder, *words):
    folder.mkdir()
    if os.geteuid():
        pytest.skip("mounting needs root")
    answer = _run("mount", *words, folder)
    if answer.returncode:
        pytest.skip(f"cannot be mounted here: {answer.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def image(folder, megabytes, *make):
    """A file system in a file, on a loop device that goes away with the mount."""
    program = _program(make[0])
    file = folder.with_suffix(".img")
    with file.open("wb") as disk:
        disk.truncate(megabytes << 20)
    answer = _run(program, *make[1:], file)
    assert answer.returncode == 0, answer.stderr
    with mounted(folder, "-o", "loop", file):
        yield folder
    file.unlink()


def small_tmpfs(folder, megabytes):
    return mounted(folder, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")


def small_ext4(folder, megabytes):
    return image(folder, megabytes, "mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal")


@contextmanager
def btrfs_with_quota(folder, megabytes):
    """Room is plenty, but the quota is not."""
    with image(folder, 256, "mkfs.btrfs", "-q"):
        for words in (["quota", "enable"], ["qgroup", "limit", f"{megabytes}M"]):
            answer = _run(_program("btrfs"), *words, folder)
            if answer.returncode:
                pytest.skip(f"no quotas here: {answer.stderr.strip()}")
        yield folder


@contextmanager
def read_only(folder, view):
    """The same files at `view`, where nobody can write them."""
    with mounted(view, "--bind", folder):
        answer = _run("mount", "-o", "remount,bind,ro", view)
        assert answer.returncode == 0, answer.stderr
        yield view


@contextmanager
def full(folder):
    """Nothing fits any more, for as long as it lasts."""
    rest = folder / "rest"
    try:
        with rest.open("wb", 0) as file:
            for size in (1 << 16, 4096, 512, 1):
                while True:
                    try:
                        file.write(bytes(size))
                        os.fsync(file.fileno())
                    except OSError:
                        break
        yield
    finally:
        rest.unlink()
