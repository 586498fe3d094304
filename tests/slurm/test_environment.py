"""The environment of a job on a real Slurm: of its own lines, and nothing of who submits it."""

import subprocess

import pytest
import toys
from shells import SHELLS, export
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


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path, monkeypatch):
    export(request.param, tmp_path, monkeypatch)


@pytest.mark.long
def test_a_job_is_started_again_whatever_its_submitters_shell_has_exported(tmp_path, shell):
    """O2: one of two tasks is killed at the first start."""
    toys.write(tmp_path, rollout=["kill_yourself_at_the_first_start"])
    job = toys.job(tmp_path, max_restarts=2)
    asked = Resources(time="5", setup=["export MINE=1; set -e"])
    started = HetSlurmExecutor(job.folder).submit_het(job, [Component("rollout", 2, asked)])
    try:
        assert exit_code(tmp_path, started.job_id, 120) == 0
    finally:
        started.cancel()
    assert results(tmp_path, "rollout", 2) == [2, 2]


def test_what_setup_exports_is_no_option_of_srun(tmp_path):
    """O11: with SLURM_TIMELIMIT the step was cancelled after a minute; SLURM_WAIT, after one of its
    tasks had ended; SLURM_TEST_EXEC, SLURM_JOB_ID: none began."""
    lines = [
        "export SLURM_TIMELIMIT=1 SLURM_CPUS_PER_TASK=4 SLURM_STEP_GRES=gpu:1 SLURM_WAIT=1",
        "export SLURM_IMMEDIATE=1 SLURM_JOB_ID=999999 SLURM_PARTITION=none SLURM_EXCLUSIVE=1",
        "export PMIX_RANK=7 PMI_FD=9 SLURM_TEST_EXEC=1 SLURM_STDINMODE=none SLURM_LABELIO=1",
    ]
    names = ["PMIX_RANK", "PMI_FD", "SLURM_TIMELIMIT", "SLURM_CPUS_PER_TASK", "SLURM_IMMEDIATE"]
    toys.write(tmp_path, rollout=["variables", "SLURM_JOB_ID", *names])
    job = toys.job(tmp_path)
    asked = Resources(time="5", setup=lines)
    started = HetSlurmExecutor(job.folder).submit_het(job, [Component("rollout", 1, asked)])
    try:
        assert exit_code(tmp_path, started.job_id, 120) == 0
    finally:
        started.cancel()
    [found] = results(tmp_path, "rollout", 1)
    assert found["SLURM_JOB_ID"] == started.job_id
    assert [found[name] for name in names] == [None] * len(names)
