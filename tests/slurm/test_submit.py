"""A run from job file to Slurm: preflight with the cluster's own word, status, cancel."""

import json
import subprocess
import time

import pytest

from relax_hpc.cli.demo import models
from relax_hpc.config.job_file import validate
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import states
from relax_hpc.launch.submit import submit
from relax_hpc.runs.cancel import cancel
from relax_hpc.runs.resume import resume
from relax_hpc.runs.status import collect
from relax_hpc.runtime.telemetry.events import read_events

pytestmark = pytest.mark.usefixtures("slurm_cluster")


@pytest.fixture
def job(tmp_path):
    tokens = models.tokenizer()
    models.save(tmp_path / "model", models.model(tokens, seed=0), tokens)
    for name in ("train", "heldout"):
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def make(rollout=None, actor=None, profile="local"):
        return validate(
            {
                "name": "run",
                "run_root": str(tmp_path / "runs"),
                "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
                "prompts": {"train": str(tmp_path / "train.jsonl"), "chat_template": False},
                "eval": {"heldout": {"path": str(tmp_path / "heldout.jsonl")}},
                "schedule": {"num_steps": 100000, "prompts_per_step": 2},
                "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
                "engines": {"rollout": {"count": 2, "resources": rollout or {}}},
                "actor": {"resources": actor or {}},
                "launch": {"profile": profile},
            },
            source="test",
        )

    return make


def test_a_run_is_seen_component_by_component_and_cancelled_as_a_whole(job, monkeypatch):
    submission = submit(job(rollout={"nodes": 2, "sbatch": ["--comment=my exp # 2"]}))
    assert submission.mode == "slurm"
    run_dir, job_id = submission.run_dir, submission.job_id
    try:
        seen = wait_for(run_dir, "RUNNING")
        assert [(each.name, each.job_id) for each in seen.components] == [
            ("rollout", f"{job_id}+0"),
            ("actor", f"{job_id}+1"),
        ]
        nodes = [each.nodes for each in seen.components]
        assert all(nodes) and nodes[0] != nodes[1]
        assert queue(job_id, "%k") == {"my exp # 2"}
        wait_for_tasks(run_dir, {"rollout", "actor"})
        subprocess.run(["scontrol", "suspend", job_id], check=True)
        assert queue(job_id, "%T") == {"SUSPENDED"}
        with pytest.raises(ConfigError, match=f"is suspended as job {job_id}; cancel it first"):
            resume(run_dir)
    finally:
        cancel(run_dir)
    assert {each.state for each in wait_for(run_dir, "CANCELLED").components} == {"CANCELLED"}

    again, said = resume(run_dir).job_id, []
    try:  # An attempt that Slurm requeues may leave the exit code of a cancel.
        (run_dir / "submission" / f"{again}_exit_code").write_text("143\n")
        with monkeypatch.context() as without:
            without.delenv("SLURM_CONF")
            assert collect(run_dir).state == "UNREACHABLE"
            with pytest.raises(ConfigError, match=f"whether job {again} still runs is not known"):
                resume(run_dir)
            with pytest.raises(LaunchError, match=f"job {again} may still run: scancel: Could"):
                cancel(run_dir)
        assert states.is_alive(collect(run_dir).state)
    finally:
        cancel(run_dir, said.append)
    assert said[0].startswith(f"job {again}: cancelled, was ")
    assert said[1:] == [f"job {job_id}: had ended before, CANCELLED"]
    assert queue(f"{job_id},{again}", "%T") <= {"CANCELLED", "COMPLETING"}


def queue(jobs, column):
    """Asks squeue for a column of some jobs."""
    command = ["squeue", "-h", "--states=all", "-j", jobs, "-o", column]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.strip() for line in lines}


def wait_for_tasks(run_dir, roles, timeout_s=120):
    """Slurm (22.05) never ends a step that was suspended while it was launched."""
    deadline = time.monotonic() + timeout_s
    while {each["role"] for each in read_events(run_dir / "events")} < roles:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for(run_dir, state, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while (status := collect(run_dir)).state != state:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status
