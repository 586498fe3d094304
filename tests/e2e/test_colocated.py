"""Actor and engines on the same GPUs, as far as one sees it without: the lease changes hands."""

import os
import re
import signal

import e2e_runs as e2e
import pytest

from relax_hpc.inference.members import Roster
from relax_hpc.launch import placement
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 4, 8, 4


def submit_colocated(tiny, run_root, *, local, steps=STEPS, ranks=2, **settings):
    small = {
        "run_root": run_root, "engines.rollout.placement": "actor", "engines.rollout.count": ranks,
        "actor.layout.data_parallel": ranks, "schedule.max_staleness": 0,
        "schedule.num_steps": steps, "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS, "actor.save_every": 2,
        "weights.advanced.checksum_every": 1, "weights.advanced.bucket_bytes": 100_000,
        "eval.heldout.every": 2, "eval.heldout.num_prompts": 16,
    }  # fmt: skip
    return e2e.submit("demo", tiny, local=local, **small | settings).run_dir


def assert_the_lease_went_to_and_fro(run_dir, steps):
    """No sample and no evaluation while the trainer has the lease, and no step while engines do."""
    events = e2e.events_of(run_dir)
    leases = [(event["time"], event["holder"]) for event in events if event["event"] == "lease"]
    assert [holder for _, holder in leases] == ["trainer", "engines"] * (steps + 1)
    for event in events:
        if event["event"] in ("shard", "eval"):
            sampled = event["time"] - event["seconds"]  # once it is committed, all may go on
            holders = {holder for at, holder in leases if sampled < at < event["time"]}
            holder = next((holder for at, holder in reversed(leases) if at < sampled), None)
            assert holder == "engines", event
            assert event["event"] == "shard" or not holders, "the lease waits for an evaluation"
    evaluated = {(e["version"], e["version_max"]) for e in events if e["event"] == "eval"}
    assert evaluated == {(version, version) for version in range(0, steps + 1, 2)}


def assert_complete(run_dir, after, steps):
    assert after["state"] == "COMPLETED", e2e.cli("logs", run_dir)[-4000:]
    progress, total = after["progress"], steps * PROMPTS * SIBLINGS
    assert progress["trajectories"]["trained"] == total
    assert progress["trajectories"]["trained_twice"] == 0
    assert progress["checksums_equal"] is True
    verified = {event["version"] for event in e2e.events_of(run_dir, "actor", "verify")}
    assert verified >= set(range(1, steps + 1))


@pytest.mark.parametrize("ranks", [2, 1], ids=["a GPU each", "both on one"])
def test_one_of_several_engines_that_a_task_keeps_on_the_actors_gpus_is_killed_and_comes_back(
    tiny, tmp_path, ranks
):
    # Rewards take their time, or else the run may be over before the engine is back.
    steps = 8
    several = {
        "engines.rollout.engines_per_task": 2, "actor.layout.data_parallel": ranks,
        "engines.rollout.advanced.engines_per_gpu": 2 // ranks,
        "reward.name": e2e.unhurried(tmp_path, 4),
    }  # fmt: skip
    run_dir = submit_colocated(tiny, tmp_path, local=True, steps=steps, **several)
    e2e.wait_until(run_dir, e2e.has_done(1), 100)
    started = {event["id"]: event for event in e2e.events_of(run_dir, "rollout", "engine")}
    assert sorted(started) == ["rollout-0.0", "rollout-0.1"]
    kill(started["rollout-0.1"], "engine_pid")
    e2e.wait_for(lambda: len(e2e.events_of(run_dir, "rollout", "engine")) > 2, 100)
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 150)
    assert_complete(run_dir, after, steps)
    assert_the_lease_went_to_and_fro(run_dir, steps)
    assert [event["id"] for event in e2e.events_of(run_dir, "rollout", "engine")[2:]] == [
        "rollout-0.1"
    ]
    assert [event["rank"] for event in e2e.events_of(run_dir, "rollout", "start")] == [0]
    held = dict.fromkeys(["rollout-0.0", "rollout-0.1", "trainer"], steps)
    assert after["progress"]["weight_versions"] == held


def test_slurm_runs_both_as_steps_of_one_component_in_turn(
    slurm_cluster, tiny, tmp_path, monkeypatch
):
    # Slurm's, of which there is nothing to compute on: tasks that ask for them by `gpus_per_node`
    # look for them, and to ask for them otherwise is refused.
    monkeypatch.setattr(placement, "_ASKS_FOR_GPUS", re.compile(r"(?!)"))
    pretended = ["--gres=gpu:2"]
    settings = {
        "launch.profile": "local",
        "actor.resources.sbatch": pretended,
        "actor.resources.srun": pretended,
        "engines.rollout.resources.srun": pretended,
    }
    run_dir = submit_colocated(tiny, tmp_path, local=False, **settings)
    during = e2e.wait_until(run_dir, e2e.has_done(1), 200)
    after = e2e.wait_until_over(run_dir, 100)
    job_id = during["job_id"]
    assert [(each["name"], each["job_id"]) for each in during["components"]] == [
        ("actor", job_id),
        ("rollout", job_id),
    ]
    assert_complete(run_dir, after, STEPS)
    assert_the_lease_went_to_and_fro(run_dir, STEPS)
    starts = e2e.events_of(run_dir, event="start")
    assert len({event["node"] for event in starts}) == 1
    assert {event["attempt"] for event in starts} == {f"{job_id}.0"}
    held = {"rollout-0": STEPS, "rollout-1": STEPS, "trainer": STEPS}
    assert after["progress"]["weight_versions"] == held
    published = e2e.events_of(run_dir, "actor", "publish")[-1]
    assert published["sync/wake_weights"] > 0 and published["sync/wake_kv_cache"] > 0


def test_an_engine_killed_in_its_sleep_and_an_actor_killed_while_engines_sleep_come_back(
    tiny, tmp_path
):
    steps = 6
    longer = {"algorithm.epochs_per_step": 6}
    run_dir = submit_colocated(tiny, tmp_path, local=True, steps=steps, ranks=1, **longer)
    e2e.wait_for(lambda: e2e.events_of(run_dir, "actor", "step"), 100)
    wait_until_asleep(run_dir)
    kill(e2e.newest(run_dir, "rollout", "engine"), "engine_pid")
    e2e.wait_for(lambda: len(e2e.events_of(run_dir, "rollout", "engine")) == 2, 100)
    wait_until_asleep(run_dir)
    for actor in [event for event in e2e.events_of(run_dir, "actor", "start") if not event["rank"]]:
        kill(actor, "pid")
    after = e2e.wait_until_over(run_dir, 150)
    assert_complete(run_dir, after, steps)
    assert len(e2e.events_of(run_dir, "rollout", "engine")) == 2  # the actor's end did it nothing
    assert max(event["start"] for event in e2e.events_of(run_dir, "actor", "start")) == 2


def kill(event, pid):
    os.kill(event[pid], signal.SIGKILL)


def wait_until_asleep(run_dir):
    def states():
        return {entry.state for entry in Roster.read(RunPaths(run_dir)).members.values()}

    e2e.wait_for(lambda: states() == {"ASLEEP"})
