"""A run that is cancelled while its announced end waits for a save, on a real Slurm."""

import subprocess
import time

import pytest
import toys
from cluster import local_slurm
from toys import until

from relax_hpc.launch import states
from relax_hpc.launch.placement import Component
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord, write
from relax_hpc.launch.slurm import HetSlurmExecutor
from relax_hpc.runs import verdict
from relax_hpc.runs.cancel import cancel
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources

pytestmark = pytest.mark.long

SAVES = """
import sys, time
sys.path.pop(0)
from relax_hpc.launch import entry
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.roles.ending import Ending

def save(run_dir, context, _bootstrap):
    ending = Ending(RunPaths(run_dir), context.attempt)
    ending.will_save()
    while not (run_dir / "saved").exists():
        time.sleep(0.1)
    ending.note_saved(7)
    time.sleep(3600)

entry.main(save)
"""


@pytest.fixture
def cluster(tmp_path_factory):
    """One whose jobs have as long between TERM and KILL as Slurm gives by itself."""
    folder = tmp_path_factory.mktemp("s")
    (folder / "extra.conf").write_text("KillWait=30\n")
    with local_slurm(folder, "slurmctld", options=("--extra", folder / "extra.conf")):
        yield


def restarts(job_id):
    command = ["squeue", "-h", "--states=all", "-j", job_id, "-O", "RestartCnt"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.usefixtures("cluster")
def test_a_run_that_is_cancelled_near_its_end_is_not_requeued(tmp_path):
    paths, task = RunPaths(tmp_path), tmp_path / "task.py"
    task.write_text(SAVES)
    component = Component("actor", 1, Resources(time="5"), "files")
    job = toys.job(tmp_path, task=(str(task),))
    job_id = HetSlurmExecutor(job.folder).submit_het(job, [component]).job_id
    launched = LaunchedComponent("actor", job_id, 1, paths.component("actor"))
    write(paths, LaunchRecord("slurm", job_id, (launched,), time.time(), None), {})

    def state():
        return states.in_queue([job_id]).known[job_id].state

    attempt, said = f"{job_id}.0", []
    try:
        until(paths.saves(attempt).exists, 60)
        subprocess.run(["scancel", "--signal=USR2", job_id], check=True)
        until(paths.ending(attempt).exists, 30)
        cancel(tmp_path, said.append)
        assert said == [f"job {job_id}: cancelled, was RUNNING"]
        assert state() == "COMPLETING", "its tasks do not hear TERM"
        (tmp_path / "saved").touch()
        until(lambda: "refused" in read_json(paths.ending(attempt)), 30)
        assert "the run was cancelled" in read_json(paths.ending(attempt))["refused"]
        until(lambda: state() != "COMPLETING", 90)
        assert (state(), restarts(job_id)) == ("CANCELLED", ["0"])
        assert verdict.read(tmp_path).what == "cancelled"
    finally:
        subprocess.run(["scancel", "--signal=KILL", job_id], check=False)
