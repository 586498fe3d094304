"""Six runs of a sweep, two settings with three seeds, on a real Slurm: a task of one is killed,
another run is preempted; `compare` tells what became of all."""

import json
import re
import subprocess

import e2e_runs as e2e
import pytest

pytestmark = pytest.mark.long
STEPS, PROMPTS = 8, 8
REWARD = """
import asyncio, os, pathlib

async def score(response, answer):
    if "SLURM_JOB_ID" in os.environ and not pathlib.Path(HURRY).exists():  # not where it is checked
        await asyncio.sleep(6)
    return float(answer in response)
"""


def test_compare_tells_a_sweep_right_in_which_a_run_is_killed_and_one_preempted(
    tiny, tmp_path, two_nodes
):
    (tmp_path / "slow.py").write_text(REWARD.replace("HURRY", repr(str(tmp_path / "hurry"))))
    settings = e2e.sized(tmp_path, STEPS, PROMPTS, 4, 16) | {
        "model.path": tiny / "model", "prompts.train": f"{tiny}/train.jsonl[0:512]",
        "eval.heldout.path": tiny / "heldout.jsonl", "launch.profile": "local", "name": "grid",
        "reward.name": f"{tmp_path}/slow.py:score", "resources.partition": "low",
        "actor.save_every": 2, "engines.rollout.resources.cpus_per_task": 2,
        "actor.resources.cpus_per_task": 2,
    }  # fmt: skip
    words = [f"--set={key}={value}" for key, value in settings.items()]
    words += ["--set=actor.optimizer.lr=1e-5,1e-3", "--seeds", "3", "--at-once", "2"]
    said = e2e.cli("sweep", e2e.REPOSITORY / "jobs" / "demo.toml", *words)
    names = [f"grid-lr_{rate}-s{seed}" for rate in ("1e-5", "1e-3") for seed in range(3)]
    runs = [tmp_path / name for name in names]
    e2e.STARTED.extend(runs)
    assert re.findall(r"^./6: (.+)$", said, re.M) == list(map(str, runs))
    waiting = [e2e.status(run_dir)["state"] for run_dir in runs]
    assert waiting[2:] == ["PENDING"] * 4, "two run at once"
    e2e.wait_for(lambda: len(e2e.events_of(runs[0], "actor", "step")) >= 3, 200)
    e2e.kill(runs[0], "actor")
    e2e.wait_for(lambda: len(e2e.events_of(runs[1], "actor", "step")) >= 3, 200)
    asked = ["srun", "--partition=main", "--nodes=2", "--cpus-per-task=8", "--mem=100M", "sleep"]
    subprocess.run([*asked, "1"], check=True, timeout=120, capture_output=True)
    (tmp_path / "hurry").touch()
    for run_dir in runs:
        assert e2e.wait_until_over(run_dir, 300)["state"] == "COMPLETED", run_dir
    attempts = {e["attempt"] for e in e2e.events_of(runs[1], "actor", "start")}
    assert len(attempts) == 2, "it was preempted"
    picture = tmp_path / "all.png"
    said = e2e.cli("compare", "--tag", "grid", "--out", picture, "--json")
    found, _ = json.JSONDecoder().raw_decode(said)
    assert found["settings"] == {"actor.optimizer.lr": [1e-3, 1e-5]}
    assert [[each["name"] for each in group["members"]] for group in found["groups"]] == [
        names[3:], names[:3],
    ]  # fmt: skip
    for group in found["groups"]:
        for member in group["members"]:
            assert [step for step, _ in member["rewards"]] == [*range(1, STEPS + 1)], "each once"
            assert [point[0] for point in member["points"]] == [0, STEPS]
    assert picture.stat().st_size > 10_000
