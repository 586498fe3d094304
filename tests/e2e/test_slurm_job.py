"""The job of the README on a real Slurm: two engines on two nodes, a trainer of two MPI ranks.

With the default algorithm, which samples further groups in place of those without spread.
"""

import json

import e2e_runs as e2e
import pytest

from relax_hpc.launch import states

STEPS, PROMPTS, SIBLINGS, STALENESS = 30, 16, 8, 1

pytestmark = pytest.mark.usefixtures("slurm_cluster")


@pytest.fixture(scope="module")
def finished(slurm_cluster, tiny, tmp_path_factory):
    """The run, what `submit` said, and what Slurm and `status` said while and after it ran."""
    submitted = e2e.submit(
        "tiny/arithmetic",
        tiny,
        local=False,
        run=e2e.console,
        **e2e.sized(tmp_path_factory.mktemp("runs"), STEPS, PROMPTS, SIBLINGS, 128),
        launch__profile="local",
        schedule__max_staleness=STALENESS,
        algorithm__preset="async",
        algorithm__epochs_per_step=1,
        actor__optimizer__lr=2e-4,
        actor__optimizer__warmup_steps=2,
    )
    run_dir = submitted.run_dir
    during = e2e.wait_until(run_dir, e2e.has_done(1), 300)
    after = e2e.wait_until_over(run_dir, 400)
    return submitted, during, after


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
    worlds = e2e.events_of(run_dir, "actor", "world")
    assert sorted(world["rank"] for world in worlds) == [0, 1]
    assert {(world["kind"], world["size"]) for world in worlds} == {("MpiWorld", 2)}
    starts = e2e.events_of(run_dir, "rollout", "start")
    assert sorted(start["rank"] for start in starts) == [0, 1], "no step was started again"


def test_the_heldout_reward_rises_and_all_end_with_the_same_weights(finished):
    run_dir, progress = finished[0].run_dir, finished[2]["progress"]
    assert progress["heldout_after"] >= progress["heldout_before"] + 0.15, progress
    held = dict.fromkeys(["trainer", "rollout-0", "rollout-1"], STEPS)
    assert progress["checksums_equal"] is True and progress["weight_versions"] == held
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trajectories"] == progress["trajectories"]
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").rglob("events.out.tfevents.*"))


def test_every_trajectory_is_trained_once_within_the_staleness_bound(finished):
    progress = finished[2]["progress"]
    total = STEPS * PROMPTS * SIBLINGS
    counts, dropped = progress["trajectories"], progress["trajectories"]["dropped"]
    skipped = dropped["skipped"]
    assert skipped > 0 and dropped == dict.fromkeys(dropped, 0) | {"skipped": skipped}
    assert (counts["trained"], counts["trained_twice"]) == (total, 0)
    assert counts["committed"] == total + skipped
    found = e2e.planned(finished[0].run_dir)
    assert found == e2e.next_that_teach(finished[0].run_dir, STEPS, PROMPTS)
    last = found[-1][1][-1]
    assert skipped == (last + 1 - STEPS * PROMPTS) * SIBLINGS, "no more was sampled than that"
    lags = [step["staleness/max"] for step in e2e.events_of(finished[0].run_dir, "actor", "step")]
    assert progress["max_staleness_seen"] == max(lags) == STALENESS, "it is used, too"
