"""Engines join a run and leave it, and nobody else is started again."""

import json
import shutil
import subprocess
import time
from contextlib import suppress

import e2e_runs as e2e
import psutil
import pytest

from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 120, 8, 4


def submit_small(tiny, run_root, *, local, **settings):
    small = e2e.sized(run_root, STEPS, PROMPTS, SIBLINGS, 8) | {
        "engines.rollout.resources.max_nodes": 2,
        "rollout.advanced.groups_per_shard": 4,
        "reward.name": e2e.unhurried(run_root),
        "actor.save_every": 1000,
        "weights.advanced.checksum_every": 1,
    }
    return e2e.submit("demo", tiny, local=local, **small | settings).run_dir


def listed(run_dir):
    """Engine id -> row."""
    rows = json.loads(e2e.cli("scale", "list", run_dir, "--json"))["rows"]
    return {row["id"]: row for row in rows}


def scale(*arguments):
    """Exit code and output of a command that may fail."""
    answer = subprocess.run(
        [e2e.CLI, "scale", *arguments], capture_output=True, text=True, timeout=300
    )
    return answer.returncode, answer.stdout + answer.stderr


def serves(run_dir, member, timeout_s):
    """Whether an engine is seen with requests."""
    secret = RunSecret.read(RunPaths(run_dir).secret)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        at = members.find(RunPaths(run_dir), member)
        with (
            suppress(EngineError),
            EngineClient(at.url, secret.engine_token(at.id, at.start)) as engine,
        ):
            if engine.num_requests():
                return True
        time.sleep(0.02)
    return False


def running_for(run_dir, module):
    """Processes of a module that work for this run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        found += [process] if module in words and f"{run_dir} " in words else []
    return found


@pytest.mark.usefixtures("slurm_cluster")
def test_an_engine_joins_a_run_under_slurm_serves_and_leaves(tiny, tmp_path):
    run_dir = submit_small(tiny, tmp_path, local=False, **{"launch.profile": "local"})
    e2e.wait_until(run_dir, e2e.has_done(1), 300)
    said = e2e.cli("scale", "out", run_dir, "--engines", "2", "--wait")
    assert said.endswith("request 1 (scale out to 2 engines): done\n")
    row = listed(run_dir)["extra-1"]
    core = e2e.status(run_dir)["components"][0]
    steps = subprocess.run(["squeue", "-hs", "-o", "%N"], capture_output=True, text=True)
    assert row["node"] in steps.stdout.split() and row["node"] != listed(run_dir)["rollout-0"][
        "node"]  # fmt: skip
    assert core["state"] == "RUNNING"
    assert e2e.cli("scale", "out", run_dir, "--engines", "2").startswith("nothing to do")

    assert serves(run_dir, "extra-1", timeout_s=100)
    said = e2e.cli("scale", "in", run_dir, "--engines", "1", "--wait")
    assert said.endswith("request 2 (scale in to 1 engine): done\n")
    assert listed(run_dir)["extra-1"]["state"] == "GONE"
    left = e2e.status(run_dir)["progress"]["steps_done"]
    assert left < STEPS, "it left while the run went on"
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 400)
    e2e.assert_whole(run_dir, after, STEPS, PROMPTS, SIBLINGS)
    assert after["progress"]["max_staleness_seen"] <= 1
    # Every update was compared: the newcomer held the trainer's weights while it served.
    compared = [e for e in e2e.events_of(run_dir, "actor", "verify") if "extra-1" in e["members"]]
    assert len(compared) > 1 and all(e["equal"] for e in e2e.events_of(run_dir, "actor", "verify"))
    assert after["progress"]["weight_versions"]["extra-1"] < STEPS
    assert {(e["role"], e["start"]) for e in e2e.events_of(run_dir, event="start")} == {
        ("rollout", 1), ("actor", 1), ("extra", 1)}  # fmt: skip
    assert len(e2e.events_of(run_dir, event="start")) == 3, "nobody was started again"


def test_a_start_that_fails_is_undone_and_the_next_one_succeeds(tiny, tmp_path):
    own = shutil.copytree(tiny, tmp_path / "tiny")
    light = {"schedule.num_steps": 100000, "schedule.prompts_per_step": 4}
    run_dir = submit_small(own, tmp_path, local=True, **light)
    weights, hidden = own / "model" / "model.safetensors", tmp_path / "hidden"
    e2e.wait_until(run_dir, e2e.has_done(1), 300)
    code, said = scale("out", run_dir, "--engines", "3")
    assert code == 2 and "room is left for 1, so use 2 or less" in said and said.count("\n") == 1

    weights.rename(hidden)
    code, said = scale("out", run_dir, "--engines", "2", "--wait")
    assert code == 1 and "request 1 (scale out to 2 engines): failed: extra-1: " in said, said
    row = listed(run_dir)["extra-1"]
    assert row["state"] == "FAILED" and "has neither model.safetensors nor" in row["reason"], row
    assert not running_for(run_dir, "extra_step")

    hidden.rename(weights)
    code, said = scale("out", run_dir, "--engines", "2", "--transport", "files", "--wait")
    assert code == 0, said
    assert said.startswith("request 2 (scale out to 2 engines, weights by files): is begun\n")
    # HEALTHY between the broadcast to the other and its own turn.
    assert listed(run_dir)["extra-2"]["state"] in ("ACTIVE", "SYNCING", "HEALTHY")
    now = e2e.status(run_dir)
    assert [(row["id"], row["pool"]) for row in now["engines"]] == [
        (engine, "rollout") for engine in ("rollout-0", "extra-1", "extra-2")
    ]
    e2e.wait_until(run_dir, e2e.has_done(now["progress"]["steps_done"] + 1), 300)
    given = e2e.events_of(run_dir, "actor", "publish")
    assert [e for e in given if (e["transport"], e["loading"]) == ("files", ["extra-2"])]
    assert [e for e in e2e.events_of(run_dir, "actor", "loaded") if e["members"] == ["extra-2"]]
    assert all(e["members"] == ["rollout-0"] for e in given if e["transport"] == "collective")
    assert all(e["equal"] for e in e2e.events_of(run_dir, "actor", "verify"))
    e2e.cli("cancel", run_dir)
    assert listed(run_dir)["extra-2"]["state"] == "GONE"
    starts = [(e["role"], e["rank"]) for e in e2e.events_of(run_dir, event="start")]
    assert sorted(starts) == [("actor", 0), ("extra", 1), ("extra", 2), ("rollout", 0)]
