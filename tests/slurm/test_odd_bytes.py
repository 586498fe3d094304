"""A toy job where Slurm prints other bytes, under GBK, without hard links: O1, O3, O7."""

import json

import pytest
import toys
from odd_places import PLACES
from test_hetjob import announce_the_time_limit, final_states, script_log, submit, tasks

from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("slurm_cluster")]


@pytest.mark.parametrize("place", PLACES)
def test_a_toy_job_is_requeued_after_an_announced_end_and_runs_to_its_own(
    tmp_path, monkeypatch, place
):
    for name, value in place(tmp_path / "place").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    run_dir = tmp_path / "run"
    started = [tmp_path / f"{role}_started" for role in ("rollout", "actor")]
    sleeps = [["sleep_at_the_first_attempt", each] for each in started]
    calls = dict(zip(("rollout", "actor"), sleeps, strict=True))
    job = submit(run_dir, [tasks("rollout", 1), tasks("actor", 1)], calls)
    # A task that is told of the end before it can hear of it is ended by the signal.
    toys.until(lambda: all(each.exists() for each in started), 90)
    announce_the_time_limit(f"{job.job_id}+0")
    toys.until(lambda: toys.results(run_dir, "rollout", 1) if result(run_dir) else None, 200)
    assert toys.results(run_dir, "rollout", 1) == [f"{job.job_id}.1"]
    assert set(final_states(job).values()) == {"COMPLETED"}, script_log(run_dir, job)
    assert "refused" not in read_json(RunPaths(run_dir).ending(f"{job.job_id}.0"))
    said = json.loads(RunPaths(run_dir).verdict.read_text())
    assert said["what"] in ("requeued", "completed")


def result(run_dir):
    return (RunPaths(run_dir).component("rollout") / "0.json").exists()
