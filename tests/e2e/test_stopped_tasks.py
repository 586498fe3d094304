"""A process that is stopped is named with its stack and ended; only its component starts again."""

import os
import re
import signal
from pathlib import Path

import e2e_runs as e2e
import pytest

from relax_hpc.runs import verdict

pytestmark = pytest.mark.long

STEPS, PROMPTS, SIBLINGS = 60, 4, 4
HANG_S = 6
PLACE = re.compile(r"process \d+: state T.*?, at [\w./-]+\.py:\d+ in \w+")
"""Where an engine was stopped, in what is said of it."""


def submit_small(tiny, tmp_path, **settings):
    """A run of three components that lasts until it is told to hurry."""
    small = e2e.sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 4) | {
        "reward.name": e2e.unhurried(tmp_path), "reference.placement": "own",
        "algorithm.kl.name": "k3", "algorithm.kl.coefficient": 0.01, "algorithm.epochs_per_step": 1,
        "algorithm.loss.name": "policy_gradient", "rollout.advanced.groups_per_shard": 4,
        "actor.layout.data_parallel": 2, "actor.save_every": 2,
        "launch.advanced.hang_timeout_s": HANG_S, "launch.max_restarts": 5,
        "engines.rollout.advanced.hang_timeout_s": HANG_S,
    }  # fmt: skip
    return e2e.submit("demo", tiny, **small | settings).run_dir


def stop(run_dir, role, rank=0):
    """Stops a task; returns it as its events name it."""
    start = [e for e in e2e.events_of(run_dir, role, "start") if e["rank"] == rank][-1]
    os.kill(start["pid"], signal.SIGSTOP)
    return role, rank


def starts(run_dir):
    """How often each component was started."""
    found = e2e.events_of(run_dir, event="start")
    return {role: sum(e["role"] == role and not e["rank"] for e in found) for role in
            ("rollout", "actor", "reference")}  # fmt: skip


def named(run_dir):
    return [(e["role"], e["rank"]) for e in e2e.events_of(run_dir, event="hang") if e["ended"]]


def wait_until_named_and_back(run_dir, *tasks):
    """Waits until these tasks were ended, their components are there again, and steps go on."""
    before = starts(run_dir)
    expected = {role: count + (role in dict(tasks)) for role, count in before.items()}
    e2e.wait_until(run_dir, lambda _: set(tasks) <= set(named(run_dir)), 100)
    e2e.wait_until(run_dir, lambda _: starts(run_dir) == expected, 60)
    done = e2e.status(run_dir)["progress"]["steps_done"]
    e2e.wait_until(run_dir, e2e.has_done(done + 1), 100)
    assert starts(run_dir) == expected, "nobody else was started again"


def stop_engine(run_dir):
    engine = e2e.events_of(run_dir, "rollout", "engine")[-1]
    os.kill(engine["engine_pid"], signal.SIGSTOP)


def assert_only_these_hung(run_dir, tasks):
    hangs = [each for each in e2e.events_of(run_dir, event="hang") if each["ended"]]
    assert sorted((each["role"], each["rank"]) for each in hangs) == sorted(tasks)
    for each in hangs:
        assert each["state"] == "T" and ".py:" in each["place"]
        assert HANG_S <= each["seconds"] <= 2 * HANG_S + 3, "within twice its limit"
        assert "most recent call first" in Path(each["log"]).read_text(encoding="utf-8")


def finish(run_dir, tmp_path):
    e2e.hurry(tmp_path)
    after = e2e.wait_until_over(run_dir, 300)
    assert after["state"] == "COMPLETED"
    assert after["progress"]["trajectories"]["trained_twice"] == 0
    e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)


@pytest.mark.usefixtures("slurm_cluster")
def test_of_each_component_that_is_stopped_under_slurm_only_that_starts_again(tiny, tmp_path):
    run_dir = submit_small(tiny, tmp_path, local=False, **{"launch.profile": "local"})
    e2e.wait_until(run_dir, e2e.has_done(1), 150)
    assert {e["kind"] for e in e2e.events_of(run_dir, "actor", "world")} == {"MpiWorld"}
    tasks = [stop(run_dir, "rollout"), stop(run_dir, "reference")]
    wait_until_named_and_back(run_dir, *tasks)
    tasks.append(stop(run_dir, "actor", 1))
    stop_engine(run_dir)
    wait_until_named_and_back(run_dir, tasks[-1])
    said = verdict.read(run_dir)
    assert (said.what, said.component) == ("restarted", "actor")
    assert said.error.startswith("actor-1: hangs in phase ")
    assert "actor-1: hangs" in e2e.cli("status", run_dir)
    tasks.append(stop(run_dir, "actor", 0))
    wait_until_named_and_back(run_dir, tasks[-1])
    finish(run_dir, tmp_path)
    assert_only_these_hung(run_dir, tasks)
    [end] = [e for e in e2e.events_of(run_dir, "rollout", "engine_end")]
    assert "hangs: engine" in end["reason"] and PLACE.search(end["reason"])


def test_ranks_that_meet_by_files_are_named_likewise(tiny, tmp_path):
    run_dir = submit_small(tiny, tmp_path, local=True)
    e2e.wait_until(run_dir, e2e.has_done(1), 150)
    assert {e["kind"] for e in e2e.events_of(run_dir, "actor", "world")} == {"StarWorld"}
    tasks = [stop(run_dir, "actor", 1)]
    wait_until_named_and_back(run_dir, tasks[-1])
    tasks.append(stop(run_dir, "actor", 0))
    wait_until_named_and_back(run_dir, tasks[-1])
    finish(run_dir, tmp_path)
    assert_only_these_hung(run_dir, tasks)
