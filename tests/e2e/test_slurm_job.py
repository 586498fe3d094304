"""The job of the README on a real Slurm: two engines on two nodes, a trainer of two MPI ranks.

With the default algorithm, which samples further groups in place of those without spread.
"""

import json

import pytest
from e2e_runs import (
    console,
    events_of,
    has_done,
    next_that_teach,
    planned,
    sized,
    submit,
    wait_until,
    wait_until_over,
)

from relax_hpc.launch import states

STEPS, PROMPTS, SIBLINGS, STALENESS = 30, 16, 8, 1

pytestmark = pytest.mark.usefixtures("slurm_cluster")


@pytest.fixture(scope="module")
def finished(slurm_cluster, tiny, tmp_path_factory):
    """The run, what `submit` said, and what Slurm and `status` said while and after it ran."""
    submitted = submit(
        "tiny/arithmetic",
        tiny,
        local=False,
        run=console,
        **sized(tmp_path_factory.mktemp("runs"), STEPS, PROMPTS, SIBLINGS, 128),
        launch__profile="local",
        schedule__max_staleness=STALENESS,
        algorithm__preset="async",
        algorithm__epochs_per_step=1,
        actor__optimizer__lr=2e-4,
        actor__optimizer__warmup_steps=2,
    )
    run_dir = submitted.run_dir
    during = wait_until(run_dir, has_done(1), 300)
    after = wait_until_over(run_dir, 400)
    return submitted, during, after


def test_submit_names_the_components_as_slurm_does_and_keeps_the_script(finished):
    submitted, during, _ = finished
    leader = during["job_id"]
    assert submitted.said.splitlines()[:3] == [
        f"rollout:   {leader}+0",
        f"actor:     {leader}+1",
        f"run directory: {submitted.run_dir}",
    ]
    script = (submitted.run_dir / "submission" / f"{leader}_submission.sh").read_text()
    assert script.count("#SBATCH hetjob") == 1


def test_both_components_run_on_nodes_of_their_own_and_complete(finished):
    _, during, after = finished
    leader = during["job_id"]
    assert during["state"] == "RUNNING"
    nodes = [component["nodes"] for component in during["components"]]
    assert len(set(nodes)) == 2 and all(nodes)
    assert after["state"] == "COMPLETED"
    seen = states.query([leader]).known
    assert {name: found.state for name, found in seen.items()} == {
        f"{leader}+0": "COMPLETED",
        f"{leader}+1": "COMPLETED",
    }


def test_the_trainer_is_one_mpi_world_of_two_and_engines_are_on_two_nodes(finished):
    run_dir = finished[0].run_dir
    worlds = events_of(run_dir, "actor", "world")
    assert sorted(world["rank"] for world in worlds) == [0, 1]
    assert {(world["kind"], world["size"]) for world in worlds} == {("MpiWorld", 2)}
    starts = events_of(run_dir, "rollout", "start")
    assert sorted(start["rank"] for start in starts) == [0, 1], "no step was started again"


def test_the_heldout_reward_rises(finished):
    progress = finished[2]["progress"]
    assert progress["heldout_after"] >= progress["heldout_before"] + 0.15, progress


def test_every_trajectory_is_trained_once_within_the_staleness_bound(finished):
    progress = finished[2]["progress"]
    total = STEPS * PROMPTS * SIBLINGS
    counts, dropped = progress["trajectories"], progress["trajectories"]["dropped"]
    skipped = dropped["skipped"]
    assert skipped > 0 and dropped == dict.fromkeys(dropped, 0) | {"skipped": skipped}
    assert (counts["trained"], counts["trained_twice"]) == (total, 0)
    assert counts["committed"] == total + skipped
    found = planned(finished[0].run_dir)
    assert found == next_that_teach(finished[0].run_dir, STEPS, PROMPTS)
    last = found[-1][1][-1]
    assert skipped == (last + 1 - STEPS * PROMPTS) * SIBLINGS, "no more was sampled than that"
    lags = [step["staleness/max"] for step in events_of(finished[0].run_dir, "actor", "step")]
    assert progress["max_staleness_seen"] == max(lags) == STALENESS, "it is used, too"


def test_trainer_and_engines_end_with_the_same_weights(finished):
    progress = finished[2]["progress"]
    assert progress["checksums_equal"] is True
    assert progress["weight_versions"] == dict.fromkeys(
        ["trainer", "rollout-0", "rollout-1"], STEPS
    )


def test_the_run_leaves_a_summary_a_curve_and_tensorboard_events(finished):
    run_dir, after = finished[0].run_dir, finished[2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trajectories"] == after["progress"]["trajectories"]
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").rglob("events.out.tfevents.*"))
