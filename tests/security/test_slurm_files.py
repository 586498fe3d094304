"""slurmd makes logs, and srun starts tasks: both as the job's script says, not as its submitter."""

import stat
import sys

import cloudpickle
import pytest

from relax_hpc import permissions
from relax_hpc.config.sections import Resources
from relax_hpc.launch.jobs import Call
from relax_hpc.launch.placement import Component
from relax_hpc.launch.script import Job
from relax_hpc.launch.slurm import HetSlurmExecutor

pytestmark = pytest.mark.usefixtures("slurm_cluster")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks do not import tests


def leave(path):
    path.write_text("x")


def test_what_slurm_and_the_tasks_of_a_job_write_is_its_owners_alone(tmp_path):
    folder = tmp_path / "job"
    with permissions.masked(0):
        with permissions.masked(0o077):
            folder.mkdir()
            calls = [
                Call(Component(name, 1, Resources()), leave, (folder / name,)) for name in "ab"
            ]
            job = HetSlurmExecutor(folder).submit_het(calls, Job("toy", folder))
        job.wait(60)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    names = {path.name for path in found}
    assert {"a", "b", f"{job.job_id}_batch.log", f"{job.job_id}_0_log.out"} <= names
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
