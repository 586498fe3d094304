"""A real Slurm cluster of virtual nodes, for as long as the tests run."""

import os
from pathlib import Path

import pytest
from cluster import local_slurm

LONGEST_FIRST = ("e2e", "slurm", "security", "bus", "engines", "unit")


def pytest_collection_modifyitems(items):
    """The longest files first: at the end, no worker waits for the one that has the last."""
    folders = Path(__file__).parent
    places = {folders / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent, len(places)))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Keeps tests from the profiles of whoever runs them, and their runs out of that one's list."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    for name in ("RELAX_PROFILE", "RELAX_RUN_ROOT"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """Brings up four nodes with two (fake) GPUs each and points this process at them.

    Yields the variables that do so; the tests' own child processes inherit them.
    """
    # Sockets have short names: pytest's own folders are too deep for munge's.
    with local_slurm(Path(tmp_path_factory.mktemp("s")), "slurmctld") as variables:
        yield variables
