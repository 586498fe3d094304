"""A run that is ended again and again, in every way, is the run that was left alone."""

from pathlib import Path

import pytest
from e2e_runs import assert_every_prompt_once, cli, events_of, hurry, sized, submit, wait_until_over
from random_ends import BRIEF, FEW, Ends

pytestmark = pytest.mark.usefixtures("slurm_cluster")

PROMPTS, SIBLINGS, SAVE_EVERY = 16, 4, 5
TOLERANCE = 0.08
"""Of the held-out reward of 512 prompts at the end: three standard errors of a difference."""
REWARD = """
import asyncio, pathlib
from relax_hpc.environments.rewards.functions import boxed_number

async def score(sample):
    if pathlib.Path(__file__).with_name("slowly").exists():
        await asyncio.sleep(SECONDS)
    return boxed_number.score(sample.response, sample.answer)
"""


def submit_slow(tiny, folder, steps, seconds=1.2, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "slow_sums.py").write_text(REWARD.replace("SECONDS", str(seconds)))
    (folder / "slowly").touch()
    small = sized(folder, steps, PROMPTS, SIBLINGS, 512) | {
        "launch.profile": "local", "reward.name": f"{folder}/slow_sums.py:score",
        "rollout.advanced.groups_per_shard": 4, "launch.max_restarts": 1000,
        "actor.save_every": SAVE_EVERY, "actor.layout.data_parallel": 2,
        "actor.optimizer.lr": 1e-4,
    }  # fmt: skip
    return submit("demo", tiny, local=False, **small | settings).run_dir


def assert_whole(run_dir, steps):
    """Every prompt was trained on once, in its order, within the bound of staleness; what was
    trained again is what ends that nobody announced have cost."""
    assert_every_prompt_once(run_dir, steps, PROMPTS)
    after = wait_until_over(run_dir, 60)["progress"]
    assert after["steps_done"] == steps
    assert after["trajectories"]["trained"] == steps * PROMPTS * SIBLINGS
    assert after["trajectories"]["trained_twice"] == 0
    assert after["max_staleness_seen"] <= 1
    assert set(after["trajectories"]["dropped"].values()) == {0}
    starts = [each for each in events_of(run_dir, "actor", "start") if each["rank"] == 0]
    unannounced = len(starts) - 1 - len(after["announced_ends"])
    assert after["redone"]["steps"] <= max(unannounced, 0) * SAVE_EVERY
    return after


def folder_of(variables):
    return Path(variables["SLURM_CONF"]).parents[1]


@pytest.mark.parametrize(
    ("counts", "steps", "seconds", "ranks"),
    [
        pytest.param(BRIEF, 60, 2.4, 1, marks=pytest.mark.timeout(600), id="brief"),
        pytest.param(
            FEW, 120, 2.4, 2, marks=[pytest.mark.long, pytest.mark.timeout(1500)], id="every"
        ),
    ],
)
def test_fifteen_ends_skip_no_prompt_and_train_on_none_twice(
    tiny, tmp_path, slurm_cluster, counts, steps, seconds, ranks
):
    run_dir = submit_slow(tiny, tmp_path, steps, seconds, **{"actor.layout.data_parallel": ranks})
    ends = Ends(run_dir, folder_of(slurm_cluster), seed=19)
    try:
        ends.all_of(counts)
        hurry(tmp_path)
        ends.completes()
        assert len(ends.done) == 15
        assert_whole(run_dir, steps)
    finally:
        cli("cancel", run_dir)
        print(*ends.done, sep="\n")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_ends_leave_the_curve_of_a_run_that_was_left_alone(tiny, tmp_path, slurm_cluster):
    steps = 400
    run_dir = submit_slow(tiny, tmp_path / "ended", steps)
    ends = Ends(run_dir, folder_of(slurm_cluster), seed=1)
    try:
        ends.all_of({kind: 7 * count for kind, count in FEW.items()})
        hurry(tmp_path / "ended")
        ended = ends.completes() and assert_whole(run_dir, steps)
    finally:
        cli("cancel", run_dir)
        print(*ends.done, sep="\n")
    assert len(ends.done) == 105
    alone = submit_slow(tiny, tmp_path / "alone", steps)
    hurry(tmp_path / "alone")
    wait_until_over(alone, 1800)
    left_alone = assert_whole(alone, steps)
    assert abs(ended["heldout_after"] - left_alone["heldout_after"]) <= TOLERANCE
    assert events_of(run_dir, "actor", "resume")
