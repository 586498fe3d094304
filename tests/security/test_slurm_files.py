"""slurmd makes logs, and srun starts tasks: both as the job's script says, not as its submitter."""

import stat

import pytest
import toys

from relax_hpc.launch.placement import Component
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.runtime.files import permissions
from relax_hpc.sections import Resources

pytestmark = pytest.mark.usefixtures("slurm_cluster")


def test_what_slurm_and_the_tasks_of_a_job_write_is_its_owners_alone(tmp_path):
    run_dir = tmp_path / "job"
    with permissions.set_umask(0):
        with permissions.set_umask(0o077):
            toys.write(run_dir, **{name: ["leave", run_dir / name] for name in "ab"})
            toy = toys.job(run_dir)
            components = [Component(name, 1, Resources()) for name in "ab"]
            job = HetSlurmExecutor(toy.folder).submit_het(toy, components)
        assert toys.exit_code(run_dir, job.job_id, 60) == 0
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in run_dir.rglob("*")}
    names = {path.name for path in found}
    assert {"a", "b", f"{job.job_id}_batch.log", f"{job.job_id}_0_log.out"} <= names
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
