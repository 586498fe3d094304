"""Two jobs that never run at the same time: a cluster that has room for one of them."""

import itertools
from pathlib import Path

import e2e_runs as e2e
import psutil
import pytest
from cluster import local_slurm

from relax_hpc.launch import record
from relax_hpc.runs import verdict

pytestmark = pytest.mark.long

STEPS, PROMPTS, STALENESS = 20, 8, 6


@pytest.fixture
def one_node(tmp_path_factory):
    """A Slurm of one node, which either side takes whole."""
    folder = Path(tmp_path_factory.mktemp("s"))
    with local_slurm(folder, "slurmctld", options=("--nodes", "1")) as variables:
        yield variables


def submit_apart(tiny, folder, **settings):
    small = e2e.sized(folder, STEPS, PROMPTS, 4, 8) | {
        "launch.profile": "local", "reward.name": e2e.unhurried(folder),
        "launch.layout": "separate", "launch.advanced.idle_s": 3, "weights.transport": "files",
        "engines.rollout.resources.cpus_per_task": 8, "actor.resources.cpus_per_task": 8,
        "schedule.max_staleness": STALENESS, "actor.save_every": 1000,
    }  # fmt: skip
    return e2e.submit("demo", tiny, local=False, **small | settings).run_dir


def windows(run_dir, role):
    """First and last sign of life of every attempt of a role's job."""
    found = {}
    for event in e2e.events_of(run_dir, role):
        if event["event"] == "start":
            attempt = event["attempt"]
        first, _ = found.get(attempt, (event["time"], None))
        found[attempt] = first, event["time"]
    return [*found.values()]


def kill_holder(run_dir, side):
    asked = ["relax_hpc.launch.holder", str(run_dir), side]
    for process in psutil.process_iter(["cmdline"]):
        if all(word in (process.info["cmdline"] or ()) for word in asked):
            process.kill()
            return True
    return False


def test_two_sides_that_never_meet_complete_though_each_is_killed_in_the_middle(
    tiny, tmp_path, one_node
):
    run_dir = submit_apart(tiny, tmp_path)
    e2e.wait_for(lambda: e2e.events_of(run_dir, "rollout", "shard"), 60)
    e2e.kill(run_dir, "rollout")
    e2e.wait_for(lambda: e2e.events_of(run_dir, "actor", "step"), 100)
    assert kill_holder(run_dir, "training")
    e2e.wait_for(lambda: e2e.events_of(run_dir, "actor", "step")[-1]["step"] > STALENESS + 1, 100)
    e2e.kill(run_dir, "actor")
    e2e.hurry(tmp_path)
    now = e2e.wait_until_over(run_dir, 200)
    assert now["state"] == "COMPLETED", e2e.cli("logs", run_dir)[-4000:]
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    done = now["progress"]
    assert done["trajectories"]["trained_twice"] == 0 and done["steps_done"] == STEPS
    assert done["max_staleness_seen"] == STALENESS and done["checksums_equal"]
    assert done["heldout_after"] is not None
    assert done["weight_versions"] == {"trainer": STEPS, "rollout-0": STEPS}
    turns = sorted(windows(run_dir, "rollout") + windows(run_dir, "actor"))
    assert len(turns) >= 6, "they take turns"
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(turns))
    saved = [event["step"] for event in e2e.events_of(run_dir, "actor", "checkpoint")]
    assert saved[0] == STALENESS + 1, "before its nodes went back"


def test_a_run_of_two_jobs_is_cancelled_and_resumed_whole(tiny, tmp_path, one_node):
    run_dir = submit_apart(tiny, tmp_path, **{"schedule.num_steps": 3})
    leaders = record.read(run_dir).leaders
    assert len(leaders) == 2
    e2e.wait_for(
        lambda: "REQUEUE_HOLD" in [c["state"] for c in e2e.status(run_dir)["components"]], 90
    )
    assert "had nothing to do: requeued" in verdict.read(run_dir).words
    assert e2e.status(run_dir)["state"] in ("RUNNING", "PENDING")
    e2e.cli("cancel", run_dir)
    e2e.wait_until_over(run_dir, 30)
    e2e.hurry(tmp_path)
    e2e.cli("resume", run_dir)
    assert not {*leaders} & {*record.read(run_dir).leaders}
    assert e2e.wait_until_over(run_dir, 150)["state"] == "COMPLETED"
    e2e.assert_every_prompt_once(run_dir, 3, PROMPTS)


def test_where_one_side_gives_up_the_other_ends_and_the_run_has_failed_until_it_is_resumed(
    tiny, tmp_path, one_node
):
    hurried = {"schedule.num_steps": 4, "schedule.max_staleness": 1, "launch.max_restarts": 0}
    run_dir = submit_apart(tiny, tmp_path, **hurried)
    e2e.hurry(tmp_path)
    e2e.wait_for(lambda: e2e.events_of(run_dir, "actor", "step"), 100)
    e2e.kill(run_dir, "actor")
    assert e2e.wait_until_over(run_dir, 120)["state"] == "FAILED"
    assert "the training side has ended before the last step" in verdict.read(run_dir).words
    e2e.cli("resume", run_dir)
    assert e2e.wait_until_over(run_dir, 150)["state"] == "COMPLETED"
    e2e.assert_every_prompt_once(run_dir, 4, PROMPTS)
