"""Clusters and locales that are not as ours: variables under which what is submitted meets them."""

import os
import shutil
import subprocess
import sys

import pytest

COMMANDS = ("sbatch", "squeue", "scontrol", "sinfo", "scancel", "sacct", "srun")
_WRAPPER = """#!/bin/bash
printf '{name}: Projet pr\\xe9par\\xe9 \\xff\\n' >&2
exec {path} "$@"
"""
_NO_LINKS = """
#include <errno.h>
int link(const char *from, const char *to) { errno = EOPNOTSUPP; return -1; }
int linkat(int a, const char *from, int b, const char *to, int flags)
{ errno = EOPNOTSUPP; return -1; }
"""


def latin(folder):
    """Slurm's commands print bytes that are no UTF-8, here and in the job."""
    folder.mkdir()
    for name in COMMANDS:
        if path := shutil.which(name):
            (folder / name).write_text(_WRAPPER.format(name=name, path=path))
            (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def chinese(folder):
    """Python takes text for GBK, unless it is told otherwise."""
    if shutil.which("localedef") is None:
        pytest.skip("localedef: not installed")
    folder.mkdir()
    made = ["localedef", "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")]
    subprocess.run(made, capture_output=True)
    variables = {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK", "LANG": "zh_CN.GBK"}
    ask = [sys.executable, "-c", "import sys; print(sys.getfilesystemencoding())"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"}
    if subprocess.run(ask, capture_output=True, env=plain | variables).stdout != b"gbk\n":
        pytest.skip("no locale of GBK can be made here")
    return variables


def without_links(folder):
    """No file system has hard links."""
    if shutil.which("cc") is None:
        pytest.skip("cc: not installed")
    folder.mkdir()
    source, library = folder / "no_links.c", folder / "no_links.so"
    source.write_text(_NO_LINKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


PLACES = [latin, chinese, without_links]
