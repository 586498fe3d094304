"""A run's components as jobs of submitit: state, paths, wait, result, cancel."""

import pytest
import submitit
import toys
from submitit.core.utils import FailedJobError

from relax_hpc.launch.placement import Component
from relax_hpc.launch.slurm import ComponentJob, HetSlurmExecutor, RunJob
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


def launch(run_dir, actor):
    """Two tasks that say who they are, and one component `actor`; its jobs."""
    toys.write(run_dir, rollout=["who_am_i"], actor=actor)
    job = toys.job(run_dir, max_restarts=0)
    asked = [Component(name, tasks, Resources(time="5"), "files") for name, tasks in
             (("rollout", 2), ("actor", 1))]  # fmt: skip
    started = HetSlurmExecutor(job.folder).submit_het(job, asked)
    return [
        ComponentJob(RunPaths(run_dir).component(each.name), job_id, range(each.tasks))
        for each, job_id in zip(asked, started.component_ids, strict=True)
    ]


def test_components_are_jobs_whose_results_are_how_they_ended(tmp_path):
    rollout, actor = launch(tmp_path, ["who_am_i"])
    assert isinstance(rollout, submitit.SlurmJob)
    assert (rollout.num_tasks, actor.num_tasks) == (2, 1)
    run = RunJob([rollout, actor])
    assert run.job_id == rollout.job_id.removesuffix("+0")
    run.wait()
    assert (rollout.results(), actor.result()) == (["COMPLETED"] * 2, "COMPLETED")
    assert run.results() == ["COMPLETED", "COMPLETED"] and run.exception() is None
    assert rollout.task(1).stdout() == "this is rollout-1\n"
    assert actor.paths.stdout.read_text() == "this is actor-0\n"


def test_a_component_that_failed_raises_with_the_end_of_its_log(tmp_path):
    _, actor = launch(tmp_path, ["raise_until", 9, "boom in a component"])
    with pytest.raises(FailedJobError, match=r"state: FAILED[^$]*ValueError: boom in a component"):
        actor.result()


def test_cancel_ends_the_whole_run(tmp_path):
    rollout, actor = launch(tmp_path, ["sleep_for_ever", str(tmp_path / "started")])
    toys.until((tmp_path / "started").exists, 60)
    actor.cancel()
    assert actor.done() and RunJob([rollout, actor]).done(force_check=True)
    with pytest.raises(FailedJobError, match="state: CANCELLED"):
        actor.result()


def test_submitits_own_executor_runs_functions_beside_runs(tmp_path):
    executor = submitit.AutoExecutor(tmp_path, cluster="hetslurm")
    executor.update_parameters(timeout_min=5, mem_gb=1, cpus_per_task=1)
    assert executor.submit(sum, [1, 2]).result() == 3
