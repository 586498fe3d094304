"""Ranks hear from a rank 0 that waits longer for others than they would wait for it."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from role_fakes import Events, config

from relax_hpc.inference import members
from relax_hpc.inference.members import EngineRegistry, Member
from relax_hpc.roles.actor import loop, rank0
from relax_hpc.roles.actor.lease import SharedGpus
from relax_hpc.roles.rollout.heldout import Due, ScoreBoard
from relax_hpc.roles.training import duties as turns
from relax_hpc.runtime.comm.world import connect
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.same_gpu import Sleep

SILENCE_S, WAIT_S = 2.0, 3.0
"""The time that ranks wait for each other, and what rank 0 waits for others."""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Calls what is given on both ranks of a world, at once; its results."""
    monkeypatch.setattr(turns, "TURN_S", 0.2)
    secret = RunSecret.new()

    def on_both(call):
        def rank(number):
            return call(
                connect(
                    "files", rank=number, size=2, rendezvous=tmp_path / "ranks", secret=secret,
                    timeout_s=SILENCE_S,
                )
            )  # fmt: skip

        with ThreadPoolExecutor(2) as threads:
            return [each.result() for each in [threads.submit(rank, n) for n in range(2)]]

    return on_both


class Slow:
    """An engine that has requests to hand back for as long as rank 0 waits."""

    def __init__(self):
        self.idle_at = time.monotonic() + WAIT_S

    def num_requests(self):
        return int(time.monotonic() < self.idle_at)

    def abort_all(self): ...
    def pause(self): ...
    def release_memory(self, tags): ...


@pytest.mark.parametrize("state", ["STARTING", "HEALTHY"])
def test_engines_that_start_or_fall_asleep_on_shared_gpus_are_waited_for_by_all_ranks(
    ranks, tmp_path, state
):
    paths, slow = RunPaths(tmp_path), Slow()

    def announce(state):
        members.announce(paths, Member("rollout-0", "17.0-1-1", "", 1, "embedded", state))

    def lease(world):
        sleep = None
        if world.rank == 0:
            register = EngineRegistry(paths, lambda: ["rollout-0"], lambda _: slow)
            sleep = Sleep(register, "17.0", timeout_s=60, start_timeout_s=60)
        SharedGpus(world, sleep, Events()).close()
        return time.monotonic()

    announce(state)
    with ThreadPoolExecutor(1) as later:
        if state == "STARTING":
            later.submit(lambda: (time.sleep(WAIT_S), announce("WAITING")))
        assert min(ranks(lease)) >= slow.idle_at - 1


def test_the_evaluation_of_the_last_policy_is_waited_for_by_all_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(rank0, "LAST_LOOK_EVERY_S", 0.2)
    paths, settings = RunPaths(tmp_path), config(engines__rollout__count=1)
    board, due = ScoreBoard(paths, 0, 1), Due("heldout", "after", config().schedule.num_steps)
    board.begin(due)
    until = time.monotonic() + WAIT_S
    newcomers = SimpleNamespace(has_newcomers=lambda: False)

    def serve(world):
        last = None
        if world.rank == 0:
            tell = turns.Turns(world).tell
            last = rank0.LastPolicy(settings, paths, newcomers, tell)
            last._look = lambda: time.monotonic() < until
        loop.serve(world, None, None, last and last.wait_for_wanted)
        return time.monotonic()

    assert min(ranks(serve)) >= until
