"""Two jobs that never run at the same time: a cluster that has room for one of them."""

import itertools
from pathlib import Path

import psutil
import pytest
from cluster import local_slurm
from e2e_runs import (
    assert_every_prompt_once,
    cli,
    events_of,
    hurry,
    kill,
    next_that_teach,
    planned,
    sized,
    status,
    submit,
    unhurried,
    wait_for,
    wait_until_over,
)

from relax_hpc.launch import record
from relax_hpc.runs import verdict

pytestmark = pytest.mark.long

STEPS, PROMPTS, STALENESS = 20, 8, 6
FLAT = """
def score(group):
    flat = sum(map(ord, str(group[0].prompt))) % 5 < 2
    return [1.0 if flat else float(number % 2) for number, _ in enumerate(group)]
"""
"""Two groups of five are without spread, whoever samples them."""


@pytest.fixture
def one_node(tmp_path_factory):
    """A Slurm of one node, which either side takes whole."""
    folder = Path(tmp_path_factory.mktemp("s"))
    with local_slurm(folder, "slurmctld", options=("--nodes", "1")) as variables:
        yield variables


def submit_apart(tiny, folder, **settings):
    small = sized(folder, STEPS, PROMPTS, 4, 8) | {
        "launch.profile": "local", "reward.name": unhurried(folder), "launch.layout": "separate",
        "launch.advanced.idle_s": 3, "weights.transport": "files",
        "engines.rollout.resources.cpus_per_task": 8, "actor.resources.cpus_per_task": 8,
        "schedule.max_staleness": STALENESS, "actor.save_every": 1000,
    }  # fmt: skip
    return submit("demo", tiny, local=False, **small | settings).run_dir


def windows(run_dir, role):
    """First and last sign of life of every attempt of a role's job."""
    found = {}
    for event in events_of(run_dir, role):
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
    wait_for(lambda: events_of(run_dir, "rollout", "shard"), 60)
    kill(run_dir, "rollout")
    wait_for(lambda: events_of(run_dir, "actor", "step"), 100)
    assert kill_holder(run_dir, "training")
    wait_for(lambda: events_of(run_dir, "actor", "step")[-1]["step"] > STALENESS + 1, 100)
    kill(run_dir, "actor")
    hurry(tmp_path)
    now = wait_until_over(run_dir, 200)
    assert now["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    assert_every_prompt_once(run_dir, STEPS, PROMPTS)
    done = now["progress"]
    assert done["trajectories"]["trained_twice"] == 0 and done["steps_done"] == STEPS
    assert done["max_staleness_seen"] == STALENESS and done["checksums_equal"]
    assert done["heldout_after"] is not None
    assert done["weight_versions"] == {"trainer": STEPS, "rollout-0": STEPS}
    turns = sorted(windows(run_dir, "rollout") + windows(run_dir, "actor"))
    assert len(turns) >= 6, "they take turns"
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(turns))
    saved = [event["step"] for event in events_of(run_dir, "actor", "checkpoint")]
    assert saved[0] == STALENESS + 1, "before its nodes went back"


def test_a_run_of_two_jobs_is_cancelled_and_resumed_whole(tiny, tmp_path, one_node):
    run_dir = submit_apart(tiny, tmp_path, **{"schedule.num_steps": 3})
    leaders = record.read(run_dir).leaders
    assert len(leaders) == 2
    wait_for(lambda: "REQUEUE_HOLD" in [c["state"] for c in status(run_dir)["components"]], 90)
    assert "had nothing to do: requeued" in verdict.read(run_dir).words
    assert status(run_dir)["state"] in ("RUNNING", "PENDING")
    cli("cancel", run_dir)
    wait_until_over(run_dir, 30)
    hurry(tmp_path)
    cli("resume", run_dir)
    assert not {*leaders} & {*record.read(run_dir).leaders}
    assert wait_until_over(run_dir, 150)["state"] == "COMPLETED"
    assert_every_prompt_once(run_dir, 3, PROMPTS)


def test_where_one_side_gives_up_the_other_ends_and_the_run_has_failed_until_it_is_resumed(
    tiny, tmp_path, one_node
):
    hurried = {"schedule.num_steps": 4, "schedule.max_staleness": 1, "launch.max_restarts": 0}
    run_dir = submit_apart(tiny, tmp_path, **hurried)
    hurry(tmp_path)
    wait_for(lambda: events_of(run_dir, "actor", "step"), 100)
    kill(run_dir, "actor")
    assert wait_until_over(run_dir, 120)["state"] == "FAILED"
    assert "the training side has ended before the last step" in verdict.read(run_dir).words
    cli("resume", run_dir)
    assert wait_until_over(run_dir, 150)["state"] == "COMPLETED"
    assert_every_prompt_once(run_dir, 4, PROMPTS)


def test_two_sides_that_never_meet_refill_every_batch_with_the_next_groups_that_teach(
    tiny, tmp_path, one_node
):
    tasks, steps, staleness = 2, 4, 3
    (tmp_path / "flat.py").write_text(FLAT)
    refilled = {
        "algorithm.groups.name": "refill", "reward.name": f"{tmp_path}/flat.py:score",
        "schedule.num_steps": steps, "schedule.max_staleness": staleness,
        "launch.advanced.idle_s": 4,
        "engines.rollout.count": tasks, "engines.rollout.resources.cpus_per_task": 8 // tasks,
    }  # fmt: skip
    run_dir = submit_apart(tiny, tmp_path, **refilled)
    now = wait_until_over(run_dir, 400)
    assert now["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    taught = planned(run_dir)
    assert taught == next_that_teach(run_dir, steps, PROMPTS)
    assert taught[-1][1][-1] >= steps * PROMPTS, "some were skipped, and replaced"
    done = now["progress"]
    assert done["trajectories"]["trained_twice"] == 0 and done["steps_done"] == steps
    assert done["max_staleness_seen"] <= staleness and done["heldout_after"] is not None
    sampling = windows(run_dir, "rollout")
    assert len(sampling) == 2, "what takes the place of skipped groups needs no further turn"
    turns = sorted(sampling + windows(run_dir, "actor"))
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(turns))


def test_on_one_machine_both_sides_are_one_job_and_engines_come_for_weights_all_the_same(
    tiny, tmp_path
):
    small = sized(tmp_path, 6, PROMPTS, 4, 8) | {
        "launch.layout": "separate", "weights.transport": "files", "schedule.max_staleness": 2,
        "weights.advanced.checksum_every": 1,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=True, **small).run_dir
    now = wait_until_over(run_dir, 100)
    assert now["state"] == "COMPLETED" and now["engines"] == []
    assert_every_prompt_once(run_dir, 6, PROMPTS)
    loaded = [event["version"] for event in events_of(run_dir, "rollout", "loaded")]
    assert loaded == sorted(loaded) and loaded[-1] == 6
    assert not events_of(run_dir, "actor", "loaded")
    assert now["progress"]["checksums_equal"] and now["progress"]["max_staleness_seen"] <= 2
