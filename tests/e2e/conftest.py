"""The tiny policy that every end-to-end run starts from."""

from pathlib import Path

import pytest
from cluster import local_slurm
from e2e_runs import REPOSITORY, STARTED, cli, wait_for

from relax_hpc.cli.demo.make_tiny import make


@pytest.fixture(scope="session")
def tiny(worker_id, tmp_path_factory):
    """Folder with a model, training and held-out prompts; made once per checkout."""
    folder = REPOSITORY / ".cache" / "tiny"
    base = tmp_path_factory.getbasetemp()
    # The first of this session's workers to get here makes it, or sees that it is there.
    shared = base if worker_id == "master" else base.parent
    try:
        (shared / "tiny").mkdir()
    except FileExistsError:
        wait_for((shared / "tiny" / "made").exists, 300)
        return folder
    folder.parent.mkdir(exist_ok=True)
    make(folder, progress=print)
    (shared / "tiny" / "made").touch()
    return folder


@pytest.fixture
def two_nodes(tmp_path_factory):
    with local_slurm(
        Path(tmp_path_factory.mktemp("s")), "slurmctld", options=("--nodes", "2")
    ) as variables:
        yield variables


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Cancels what the test has submitted, while what it ran on is there."""
    while STARTED:
        cli("cancel", STARTED.pop())
