"""A real Slurm cluster of virtual nodes, for as long as the tests run."""

import os
import signal
from pathlib import Path

import pytest
from cluster import local_slurm

from relax_hpc.runtime.files import storage

BUSY = ("e2e", "slurm", "security", "engines")
"""Folders whose tests keep processors busy; those of others mostly wait, or are short."""


@pytest.hookimpl(trylast=True)  # of those that -m has left
def pytest_collection_modifyitems(items):
    """The files of busy folders in the order above, with two thirds of the others among them.

    So there is a worker that waits beside those that compute; the last files are short ones.
    """
    folders = [Path(__file__).parent / name for name in BUSY]
    files = list(dict.fromkeys(item.path for item in items))
    busy = sorted(
        (file for file in files if file.parent in folders),
        key=lambda file: folders.index(file.parent),
    )
    others = [file for file in files if file.parent not in folders]
    places = {file: 2 / 3 * place / len(busy) for place, file in enumerate(busy)}
    places |= {file: place / len(others) for place, file in enumerate(others)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Keeps tests from the profiles of whoever runs them, and their runs out of that one's list."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    for name in ("RELAX_PROFILE", "RELAX_RUN_ROOT"):
        os.environ.pop(name, None)
    # A shell that runs them in the background has it ignored, here and in what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def unsettled():
    """Undoes what a task or command that began in this process settled: how long it waits out
    errors of files, and the umask."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    storage.settle(0)
    os.umask(umask)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """Brings up four nodes with two (fake) GPUs each and points this process at them.

    Yields the variables that do so; the tests' own child processes inherit them.
    """
    # Sockets have short names: pytest's own folders are too deep for munge's.
    with local_slurm(Path(tmp_path_factory.mktemp("s")), "slurmctld") as variables:
        yield variables
