"""A real Slurm cluster of virtual nodes, for as long as the tests run."""

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCAL_SLURM = Path(__file__).parents[1] / "slurm" / "local_slurm.sh"
LONGEST_FIRST = ("e2e", "slurm", "security", "bus", "engines", "unit")


def pytest_collection_modifyitems(items):
    """The longest files first: at the end, no worker waits for the one that has the last."""
    folders = Path(__file__).parent
    places = {folders / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent, len(places)))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Keeps the runs of the tests out of the list of whoever runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """Brings up four nodes with two (fake) GPUs each and points this process at them.

    Yields the variables that do so; the tests' own child processes inherit them.
    """
    # Sockets have short names: pytest's own folders are too deep for munge's.
    with local_slurm(Path(tmp_path_factory.mktemp("s")), "slurmctld") as variables:
        yield variables


@contextmanager
def local_slurm(folder, *daemons, options=()):
    """Does so in a folder, if these programs are installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in daemons if shutil.which(name, path=path) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed")
    up = [LOCAL_SLURM, "up", "--dir", folder, "--nodes", "4", "--gpus-per-node", "2", *options]
    answer = subprocess.run(up, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        subprocess.run([LOCAL_SLURM, "down", "--dir", folder], timeout=60)
        pytest.fail(f"local_slurm.sh up: {answer.stderr}")
    before = dict(os.environ)
    for name, value in re.findall(r"^export (\w+)=(.*)$", answer.stdout, re.MULTILINE):
        os.environ[name] = value.replace("$PATH", before["PATH"])
    try:
        yield {name: os.environ[name] for name in ("SLURM_CONF", "PATH")}
    finally:
        os.environ.clear()
        os.environ.update(before)
        subprocess.run([LOCAL_SLURM, "clean", "--dir", folder], timeout=60, capture_output=True)
