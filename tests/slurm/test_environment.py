"""The environment of a job on a real Slurm: of its own lines, and nothing of who submits it."""

import subprocess

import pytest
import toys
from toys import exit_code, results

from relax_hpc.launch.placement import Component
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.sections import Resources

pytestmark = pytest.mark.usefixtures("slurm_cluster")

BOUND = ("SLURM_CPU_BIND", "SLURM_HINT", "SLURM_EXACT")


def test_tasks_have_what_setup_exports_and_nothing_of_the_job_that_submits_theirs(
    tmp_path, monkeypatch
):
    # Of an interactive step, in a job that was requeued once.
    for name, value in {
        "SLURM_RESTART_COUNT": "1", "SLURM_EXACT": "1", "SLURM_HINT": "nomultithread",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SBATCH_PARTITION": "left",
        "SBATCH_EXPORT": "NONE",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    asked = {"time": "5", "partition": "right", "setup": ["export MINE=1"]}
    components = [
        Component(
            "rollout", 1, Resources(**asked, sbatch=["--export=NONE", "--hint=nomultithread"])
        ),
        Component("actor", 1, Resources(**asked)),
    ]
    calls = {each.name: ["variables", "MINE", *BOUND] for each in components}
    toys.write(tmp_path, **calls)
    job = toys.job(tmp_path)
    started = HetSlurmExecutor(job.folder).submit_het(job, components)
    try:
        assert exit_code(tmp_path, started.job_id, 90) == 0
    finally:
        started.cancel()
    expected = {"attempt": f"{started.job_id}.0", "MINE": "1"}
    for each in components:
        [found] = results(tmp_path, each.name, 1)
        assert found | expected == found
        # srun itself says which CPUs it binds a task to.
        assert found["SLURM_EXACT"] is found["SLURM_HINT"] is None
        assert found["SLURM_CPU_BIND"] != "quiet,mask_cpu:0x1"
    asked = ["squeue", "-h", "--states=all", "-j", started.job_id, "-o", "%P"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert {*answer.stdout.split()} == {"right"}
