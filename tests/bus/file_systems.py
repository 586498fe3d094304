"""File systems to fill, to forbid and to limit; each is unmounted again, and nothing else is."""

import os
import subprocess
from contextlib import contextmanager

import pytest


def _run(*words):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)


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


def small_tmpfs(folder, megabytes):
    return mounted(folder, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")


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
