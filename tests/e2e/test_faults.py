"""A killed task comes back where it was; a cancelled run ends, and nothing else does."""

import os
import signal
import subprocess
import time

import e2e_runs as e2e
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc.launch import record
from relax_hpc.launch.local import processes
from relax_hpc.runs import verdict

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 24, 8, 4
SLOW_AT_LAST = """
import asyncio, pathlib

async def score(response):
    if pathlib.Path(__file__).with_name("slowly").exists():
        await asyncio.sleep(2)
    return float(len(response) % 2)
"""


def submit_small(tiny, run_root, *, local, **settings):
    small = e2e.sized(run_root, STEPS, PROMPTS, SIBLINGS, 16) | {
        "rollout.advanced.groups_per_shard": 4,
        "actor.save_every": 4,
    }
    return e2e.submit("demo", tiny, local=local, **small | settings).run_dir


def shards_since(run_dir, start):
    """Shards that a later start of rollout has committed."""
    begun = [event["time"] for event in e2e.events_of(run_dir, "rollout", "start")][start - 1]
    return [event for event in e2e.events_of(run_dir, "rollout", "shard") if event["time"] > begun]


def assert_complete(run_dir, after, engines=("rollout-0",)):
    """Nothing lost, nothing doubled, everybody at the last policy."""
    e2e.assert_whole(run_dir, after, STEPS, PROMPTS, SIBLINGS)
    progress = after["progress"]
    assert progress["weight_versions"] == dict.fromkeys(["trainer", *engines], STEPS)
    assert progress["checksums_equal"] is True


def test_a_killed_engine_rollout_and_actor_go_on_where_they_were(tiny, tmp_path):
    slow = {
        "reward.name": e2e.unhurried(tmp_path)
    }  # or else the run may be over before the last kill
    run_dir = submit_small(tiny, tmp_path, local=True, **slow)
    e2e.wait_until(run_dir, e2e.has_done(2), 100)
    actor = e2e.newest(run_dir, "actor", "start")["pid"]
    e2e.kill(run_dir, "rollout", "engine", ["engine_pid"])
    done = e2e.status(run_dir)["progress"]["steps_done"]
    e2e.wait_until(
        run_dir, e2e.has_done(done + 3), 100
    )  # more than was ready: the new engine sampled
    assert len(e2e.events_of(run_dir, "rollout", "engine")) == 2
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 1
    assert "SIGKILL" in e2e.newest(run_dir, "rollout", "engine_end")["reason"]
    e2e.kill(run_dir, "rollout", "engine", e2e.NODE)
    done = e2e.status(run_dir)["progress"]["steps_done"]
    # Two steps more than what was ready: the restarted engine sampled for them.
    e2e.wait_until(run_dir, e2e.has_done(done + 3), 100)
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 2
    assert [start["pid"] for start in e2e.events_of(run_dir, "actor", "start")] == [actor]
    assert psutil.pid_exists(actor) and shards_since(run_dir, 2)

    rollout = e2e.newest(run_dir, "rollout", "start")["pid"]
    os.kill(actor, signal.SIGKILL)
    e2e.wait_until(run_dir, lambda _: len(e2e.events_of(run_dir, "actor", "resume")) == 1, 100)
    resumed = e2e.newest(run_dir, "actor", "resume")["step"]
    assert resumed % 4 == 0 and 0 < resumed <= e2e.newest(run_dir, "actor", "step")["step"]
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 150)
    assert e2e.newest(run_dir, "rollout", "start")["pid"] == rollout
    assert_complete(run_dir, after)


def test_the_last_evaluation_is_made_once_though_the_run_ends_and_rollout_dies_during_it(
    tiny, tmp_path
):
    """The held-out prompts are answered slowly, so the last step is long over meanwhile."""
    (tmp_path / "at_last.py").write_text(SLOW_AT_LAST)
    slow = {
        "reward.name": f"{tmp_path}/at_last.py:score", "schedule.num_steps": 2,
        "eval.heldout.num_prompts": 24, "actor.save_every": 1,
        "engines.rollout.max_running_requests": 2,
    }  # fmt: skip
    run_dir = submit_small(tiny, tmp_path, local=True, **slow)

    def part():
        """Prompts that are scored of the last evaluation; none before it has begun."""
        [*found] = (run_dir / "eval" / "heldout").glob("after-2.0-of-1.part")
        return len(found[0].read_text().splitlines()) if found else 0

    e2e.wait_until(run_dir, e2e.has_done(1), 100)
    (tmp_path / "slowly").touch()
    e2e.wait_for(lambda: part() >= 2, 60)
    e2e.kill(run_dir, "rollout", "engine", e2e.NODE)
    starts = len(e2e.events_of(run_dir, "rollout", "start"))
    e2e.wait_for(lambda: len(e2e.events_of(run_dir, "rollout", "start")) > starts, 60)
    before = part()
    e2e.wait_for(lambda: part() > before, 90)
    e2e.cli("cancel", run_dir)
    assert not e2e.events_of(run_dir, "rollout", "eval")[1:]
    (tmp_path / "slowly").unlink()
    e2e.cli("resume", run_dir, "--local")
    after = e2e.wait_until_over(run_dir, 150)
    assert after["state"] == "COMPLETED"
    assert after["progress"]["heldout_after"] is not None
    [last] = [e for e in e2e.events_of(run_dir, "rollout", "eval") if e["when"] == "after"]
    assert (last["version"], last["version_max"], last["num_samples"]) == (2, 2, 24)
    [file] = (run_dir / "eval" / "heldout").glob("*-after-2.0.jsonl")
    assert len(file.read_text().splitlines()) == 24
    steps = [event["step"] for event in e2e.events_of(run_dir, "actor", "step")]
    assert steps == [1, 2]


JUDGED = """
async def score(response, prompt, engines):
    said = await engines["judge"].generate(prompt, max_new_tokens=8)
    return float(said == response)

score.pools = ("judge",)
"""


@pytest.mark.usefixtures("slurm_cluster")
def test_a_killed_rollout_step_and_a_judge_go_on_under_slurm_while_the_trainer_stays(
    tiny, tmp_path
):
    (tmp_path / "judge.py").write_text(JUDGED)
    run_dir = submit_small(
        tiny, tmp_path, local=False,
        **{
            "launch.profile": "local", "engines.judge.max_running_requests": 8,
            "reward.name": f"{tmp_path}/judge.py:score", "reward.deadline_s": 60,
        },
    )  # fmt: skip
    before = e2e.wait_until(run_dir, e2e.has_done(3), 100)
    judged = {row["pool"]: row for row in before["engines"]}["judge"]
    assert (judged["id"], judged["state"], judged["version"]) == ("judge-0", "HEALTHY", "fixed")
    assert judged["node"] in [c["nodes"] for c in before["components"] if c["name"] == "judge"]
    actor = e2e.newest(run_dir, "actor", "start")["pid"]
    e2e.kill(run_dir, "judge", "engine", ["engine_pid"])
    e2e.kill(run_dir, "rollout", "engine", e2e.NODE)
    e2e.wait_until(run_dir, judge_is_back(run_dir), 60)
    after = e2e.wait_until_over(run_dir, 200)
    assert len(e2e.events_of(run_dir, "judge", "engine")) == 2
    assert len(e2e.events_of(run_dir, "judge", "start")) == 1
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 2 and shards_since(run_dir, 2)
    assert [start["pid"] for start in e2e.events_of(run_dir, "actor", "start")] == [actor]
    assert_complete(run_dir, after)


@pytest.mark.usefixtures("slurm_cluster")
def test_a_killed_rollout_task_starts_again_alone_while_the_other_on_its_node_goes_on(
    tiny, tmp_path
):
    two = {
        "launch.profile": "local", "reward.name": e2e.unhurried(tmp_path),
        "engines.rollout.count": 2, "engines.rollout.resources.nodes": 1,
    }  # fmt: skip
    run_dir = submit_small(tiny, tmp_path, local=False, **two)

    def starts(rank):
        return [e for e in e2e.events_of(run_dir, "rollout", "start") if e["rank"] == rank]

    e2e.wait_until(run_dir, e2e.has_done(2), 200)
    os.kill(starts(1)[-1]["pid"], signal.SIGKILL)
    e2e.wait_until(run_dir, lambda _: len(starts(1)) == 2, 100)
    assert verdict.read(run_dir).words.startswith("rollout-1: start 1 killed by SIGKILL on n")
    assert psutil.pid_exists(starts(0)[0]["pid"])
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 300)
    assert [e["start"] for e in starts(0)] == [1] and [e["start"] for e in starts(1)] == [1, 2]
    assert len({e["node"] for rank in range(2) for e in starts(rank)}) == 1
    assert after["progress"]["restarts"] == {"rollout": 1}
    engines = [e["id"] for e in e2e.events_of(run_dir, "rollout", "engine")]
    assert sorted(engines) == ["rollout-0", "rollout-1", "rollout-1"]
    assert_complete(run_dir, after, ("rollout-0", "rollout-1"))
    [component] = [c for c in after["components"] if c["name"] == "rollout"]
    assert (component["finished_tasks"], component["tasks"]) == (2, 2)
    for rank in range(2):
        assert list((run_dir / "submission" / "rollout").glob(f"*_{rank}_log.out"))


def judge_is_back(run_dir):
    """Holds once a second engine is listed as healthy."""
    return lambda now: (
        len(e2e.events_of(run_dir, "judge", "engine")) == 2
        and ("judge-0", "HEALTHY") in [(row["id"], row["state"]) for row in now["engines"]]
    )


def test_cancel_ends_all_of_a_run_and_nothing_else(tiny, tmp_path):
    endless = {"schedule.num_steps": 100000, "reward.name": e2e.unhurried(tmp_path)}
    # Its run directory differs in one letter at the end: a pattern would hit both.
    run_dir, bystander = (
        submit_small(tiny, tmp_path, local=True, name=name, **endless) for name in ("run", "run2")
    )
    decoy = subprocess.Popen(["sleep", "600"])
    try:
        e2e.wait_until(run_dir, e2e.has_done(1), 150)
        e2e.wait_until(bystander, e2e.has_done(1), 150)
        started = started_by(run_dir)
        assert len(started) >= 6, "script, two supervised steps, rollout, engine, actor"
        assert_newest_step_is_shown(run_dir, within_s=10)
        e2e.console("cancel", run_dir)
        assert_drawn_to_the_end(run_dir)
        _, alive = psutil.wait_procs(started, timeout=5)
        assert alive == []
        assert not [process for process in psutil.process_iter() if names(process, run_dir)]
        assert e2e.status(run_dir)["state"] == "CANCELLED"

        assert decoy.poll() is None
        done = e2e.status(bystander)["progress"]["steps_done"]
        e2e.wait_until(bystander, e2e.has_done(done + 1), 60)
        assert {each["start"] for each in e2e.events_of(bystander, event="start")} == {1}
        script = psutil.Process(record.read(bystander).controller.pid)
        family = [*script.children(recursive=True), script]
        script.kill()
        psutil.wait_procs(family, timeout=30)
        assert_drawn_to_the_end(bystander)
    finally:
        decoy.kill()
        decoy.wait()
        e2e.cli("cancel", run_dir)
        e2e.cli("cancel", bystander)


def board_of(run_dir):
    """Steps that TensorBoard shows, with the time at which each was trained."""
    view = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    if "reward/mean" not in view.Tags()["scalars"]:  # there is no step in it yet
        return {}
    return {point.step: point.wall_time for point in view.Scalars("reward/mean")}


def assert_newest_step_is_shown(run_dir, within_s):
    step = e2e.newest(run_dir, "actor", "step")
    while not (run_dir / "tensorboard").exists() or step["step"] not in board_of(run_dir):
        assert time.time() - step["time"] < within_s
        time.sleep(0.2)


def assert_drawn_to_the_end(run_dir):
    steps = {event["step"]: event["time"] for event in e2e.events_of(run_dir, "actor", "step")}
    assert board_of(run_dir) == pytest.approx(steps)
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")


def started_by(run_dir):
    """Everything that runs for a run: by descent, by its own records and by its command line."""
    launched = record.read(run_dir)
    steps = [each for c in launched.components for each in processes(c.folder, launched.leader)]
    events = e2e.events_of(run_dir)
    pids = {launched.controller.pid, *(step.pid for step in steps)}
    pids |= {event[key] for event in events for key in ("pid", "engine_pid") if key in event}
    pids |= {child.pid for pid in set(pids) for child in psutil.Process(pid).children(True)}
    pids |= {process.pid for process in psutil.process_iter() if names(process, run_dir)}
    return [psutil.Process(pid) for pid in pids]


def names(process, run_dir):
    """Whether a command line has the run directory, or a path below it, in it."""
    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return f"{run_dir} " in f"{words} " or f"{run_dir}/" in words
