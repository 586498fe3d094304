"""What Slurm itself says of a job that waits, and that it is said to the user."""

import json
import subprocess
import time

import pytest

from relax_hpc.cli.demo import models
from relax_hpc.config.job_file import validate
from relax_hpc.launch.submit import submit
from relax_hpc.runs import report
from relax_hpc.runs.cancel import cancel
from relax_hpc.runs.status import Watch, collect

pytestmark = pytest.mark.usefixtures("slurm_cluster")


@pytest.fixture
def run(tmp_path):
    """Submits a run that waits, and cancels it in the end."""
    tokens = models.tokenizer()
    models.save(tmp_path / "model", models.model(tokens, seed=0), tokens)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    started = []

    def make(name, **resources):
        tree = {
            "name": name,
            "run_root": str(tmp_path / "runs"),
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "prompts": {"train": str(tmp_path / "train.jsonl"), "chat_template": False},
            "schedule": {"num_steps": 1, "prompts_per_step": 1},
            "resources": resources,
            "launch": {"profile": "local"},
        }
        started.append(submit(validate(tree, source="test")))
        return started[-1]

    yield make
    for each in started:
        cancel(each.run_dir)


def until(ready):
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_a_job_says_that_it_waits_for_nodes_for_others_or_for_another_job(run, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "left")  # by which squeue itself shows other jobs alone
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%H h")
    filler = ["sbatch", "--parsable", "-N4", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 90"]
    other = subprocess.run(filler, capture_output=True, text=True, check=True).stdout.strip()
    try:
        first = run("first").run_dir
        until(lambda: collect(first).queue in ("Resources", "Priority"))
        found = collect(first)
        assert found.state == "PENDING" and report.text(found).startswith("first: PENDING (")
        assert next(report.progress(first)).startswith(f"PENDING ({found.queue}): ")
        second = run("second", dependency=f"afterok:{found.job_id}").run_dir
        until(lambda: collect(second).queue == "Dependency")
        assert "  queue         waits for the jobs that it depends on" in report.text(
            collect(second)
        )
        assert not Watch(second).is_over()
    finally:
        subprocess.run(["scancel", other], check=True)
