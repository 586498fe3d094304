"""A Slurm of virtual nodes on this machine."""

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCAL_SLURM = Path(__file__).parents[1] / "slurm" / "local_slurm.sh"


@contextmanager
def local_slurm(folder, *daemons, options=()):
    """Brings one up in a folder, if these programs are installed, and points this process at it.

    Yields the variables that do so.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in daemons if shutil.which(name, path=path) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed")
    up = [LOCAL_SLURM, "up", "--dir", folder, "--nodes", "4", "--gpus-per-node", "2", *options]
    answer = subprocess.run(up, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        subprocess.run([LOCAL_SLURM, "down", "--dir", folder], timeout=60)
        pytest.fail(f"local_slurm.sh up: {answer.stderr}")
    before = dict(os.environ)
    told = dict(re.findall(r"^export (\w+)=(.*)$", answer.stdout, re.MULTILINE))
    os.environ.update(
        {name: value.replace("$PATH", before["PATH"]) for name, value in told.items()}
    )
    try:
        yield {name: os.environ[name] for name in {"PATH", *told}}
    finally:
        os.environ.clear()
        os.environ.update(before)
        subprocess.run([LOCAL_SLURM, "clean", "--dir", folder], timeout=60, capture_output=True)
