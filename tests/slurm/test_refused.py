"""Jobs that the cluster cannot run are refused in one line, by the command line, and not queued."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.cli.demo import models

CLI = Path(sys.executable).with_name("relax-hpc")
JOB = """
name = "refused"
model = { path = "model", dtype = "float32" }
prompts.train = "prompts.jsonl"
eval.heldout.path = "heldout.jsonl"
schedule = { num_steps = 5, prompts_per_step = 4 }
"""

pytestmark = pytest.mark.usefixtures("slurm_cluster")


@pytest.fixture
def folder(tmp_path):
    tokens = models.tokenizer()
    models.save(tmp_path / "model", models.model(tokens, seed=0), tokens)
    for name, prompts in {
        "prompts": ("1+1=", "0+2=", "4-2=", "2*1="),
        "heldout": ("2+0=",),
    }.items():
        rows = (json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts)
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("partition='mian'", "partition = 'mian': no such partition; did you mean main?"),
        ("nodes=5", "count = 1: does not divide over 5 nodes; use a multiple of 5"),
        ("sbatch=['--no-such-option']", "sbatch refused the job: sbatch: unrecognized option"),
    ],
)
def test_what_the_cluster_cannot_give_is_refused(folder, setting, message):
    command = [CLI, "submit", "job.toml", "--set", f"engines.rollout.resources.{setting}"]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and answer.stdout == ""
    *before, said = answer.stderr.splitlines()
    assert message in said and before in ([], ["weights: engines join by MPI"])
    assert not (folder / "runs" / "refused").exists()
    queue = subprocess.run(["squeue", "-h", "-n", "refused"], capture_output=True, text=True)
    assert (queue.returncode, queue.stdout) == (0, "")


def test_what_a_preemption_costs_is_said_before_a_job_is_queued(folder):
    command = [CLI, "check", "job.toml", "-p", "low"]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    said = "engines.rollout.resources: partition low announces a preemption 15 s before"
    assert answer.stderr.count(said) == 1 and answer.stderr.count("preemption") == 1
    answer = subprocess.run(
        [*command[:-1], "main"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0 and "preempt" not in answer.stderr
