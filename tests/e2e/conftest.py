"""The tiny policy that every end-to-end run starts from."""

import pytest
from e2e_runs import REPOSITORY

from relax_hpc.roles.make_tiny import make


@pytest.fixture(scope="session")
def tiny(worker_id):
    """Folder with a model, training and held-out prompts; made once per checkout and worker."""
    folder = REPOSITORY / ".cache" / f"tiny-{worker_id}"
    folder.parent.mkdir(exist_ok=True)
    make(folder, progress=print)
    return folder
