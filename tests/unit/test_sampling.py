"""Which engines a rollout task asks, how, and what it notes of them."""

import asyncio
from types import SimpleNamespace

import pytest
from roles.role_fakes import Events, config

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.inference import members, pool_client
from relax_hpc.inference.generation import Counts, Draft, Sampling
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.pool import Endpoint, EngineLoad
from relax_hpc.inference.pool_client import LoadMeter, client_of
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths

SECRET = RunSecret(bytes(32))


class Pool:
    """Answers a prompt and a seed with both."""

    loads, is_excused = (), False

    def __init__(self, connect, **settings):
        self.connect, self.settings, self.asked, self.now = connect, settings, [], 3

    async def version(self):
        return self.now

    async def sample(self, prompt, seed, sampling, *, homes=(), draft=None):
        self.asked.append((prompt, seed, sampling, homes, draft))
        return "the response"

    def enlist(self, states):
        self.states = states

    async def adapt(self):
        pass

    def excuse(self):
        self.is_excused = True

    async def aclose(self):
        pass


@pytest.fixture
def sampler_of(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_client, "Pool", Pool)

    def make(own=("rollout-0",), name="rollout", **settings):
        paths = RunPaths(tmp_path)
        monkeypatch.setattr(pool_client.RunSecret, "read", lambda path: SECRET)
        made = client_of(config(**settings), paths, name, own=own, stop_token=99, events=Events())
        return made, paths

    return make


def test_engines_are_asked_as_the_episode_says_and_the_draft_is_the_callers(sampler_of):
    sampler, _ = sampler_of(
        engines__rollout__max_running_requests=5, launch__advanced__peer_timeout_s=33
    )
    assert sampler._pool.settings == {"max_in_flight": 5, "patience_s": 33}
    how = Sampling(0.7, 17, (), False, True, 0.9, 5, max, max_tokens=1000, min_version=4)
    draft = Draft([5])
    asked = sampler.sample([1, 2], draft, how, seed=8, homes=("episode", 3))
    assert asyncio.run(asked) == "the response"
    [(*found, given)] = sampler._pool.asked
    wanted = how._replace(stop_token_ids=(99,))
    assert found == [[1, 2], 8, wanted, ("episode", 3)] and given is draft
    endless = how._replace(ignore_eos=True)
    asyncio.run(sampler.sample([1, 2], draft, endless, seed=8, homes=()))
    assert sampler._pool.asked[-1][2] == wanted._replace(stop_token_ids=(), ignore_eos=True)


def test_a_task_gives_up_when_for_too_long_no_engine_had_the_newest_weights(
    sampler_of, monkeypatch
):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pool_client.time, "monotonic", lambda: clock.now)
    sampler, _ = sampler_of(launch__advanced__peer_timeout_s=10)
    clock.now = 108.0
    assert asyncio.run(sampler.version()) == 3
    sampler._pool.now = None
    clock.now = 118.0
    assert asyncio.run(sampler.version()) is None
    clock.now = 118.5
    with pytest.raises(PeerTimeoutError, match=r"rollout-0: no engine .* for 10 s"):
        asyncio.run(sampler.version())


def announce(paths, name, url="http://x", state="HEALTHY"):
    members.announce(paths, Member(name, "1", url, 1, "embedded", state))


def at(name):
    return Endpoint(name, "1", "http://x", SECRET.engine_token(name, "1"))


def test_a_task_asks_its_own_engines_and_those_that_were_added_but_not_its_neighbours(sampler_of):
    sampler, paths = sampler_of(own=("rollout-0.0", "rollout-0.1"))
    for name in ("rollout-0.0", "rollout-1.0", "extra-2"):
        announce(paths, name)
    announce(paths, "rollout-0.1", url="")
    assert asyncio.run(sampler._look()) is False
    assert sampler._pool.states == {at("rollout-0.0"): "serving"}  # with the first policy
    active = RosterEntry("1", 4, "ACTIVE")
    names = ("rollout-0.0", "rollout-1.0", "extra-2")
    Roster(4, dict.fromkeys(names, active)).write(paths)
    assert asyncio.run(sampler._look()) is False
    assert sampler._pool.states == {at("rollout-0.0"): "serving", at("extra-2"): "serving"}
    Roster(4, {"rollout-0.0": RosterEntry("1", None, "SYNCING")}).write(paths)
    assert asyncio.run(sampler._look()) is True  # soon again
    assert sampler._pool.states == {at("rollout-0.0"): "held"}
    Roster(4, {"rollout-1.0": RosterEntry("1", None, "SYNCING")}).write(paths)
    assert asyncio.run(sampler._look()) is False  # a neighbour's


@pytest.mark.parametrize(
    "settings",
    [
        {"weights__quantize": "fp8", "engines__rollout__kind": "sglang"},
        {"model__weights": "another/checkpoint"},  # the trainer begins with these, not the folder's
    ],
)
def test_an_engine_that_begins_without_the_policy_is_held_until_it_is_given_it(
    sampler_of, settings
):
    sampler, paths = sampler_of(**settings)
    announce(paths, "rollout-0")
    asyncio.run(sampler._look())
    assert sampler._pool.states == {at("rollout-0"): "held"}


def test_while_engines_sleep_for_the_trainer_nobody_loses_patience(sampler_of, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pool_client.time, "monotonic", lambda: clock.now)
    sampler, paths = sampler_of(launch__advanced__peer_timeout_s=10)
    sampler._pool.now = None
    Roster(4, {"rollout-0": RosterEntry("1", 4, "ASLEEP")}).write(paths)
    clock.now = 500.0
    assert asyncio.run(sampler._look()) is True
    assert asyncio.run(sampler.version()) is None
    assert sampler._pool.is_excused


def test_whoever_asks_is_told_what_ended_the_looks_at_the_records(sampler_of, monkeypatch):
    monkeypatch.setattr(pool_client, "_LOOK_S", 0.01)
    sampler, _ = sampler_of()

    async def run():
        async with sampler:
            sampler._members.get = lambda *_: 1 / 0
            await asyncio.wait({sampler._watch}, timeout=10)
            for ask in (
                sampler.version,
                lambda: sampler.complete([1], 5),
                lambda: sampler.sample([1], Draft(), Sampling(0.7, 17), seed=8, homes=()),
            ):
                with pytest.raises(ZeroDivisionError):
                    await ask()

    asyncio.run(run())


def test_loads_are_noted_now_and_then_as_what_came_since_also_after_a_restart(monkeypatch):
    clock, events = SimpleNamespace(now=0.0), Events()
    monkeypatch.setattr(pool_client.time, "monotonic", lambda: clock.now)
    meter = LoadMeter(events)

    def counts_of(num_tokens):
        return Counts(num_tokens, 10 * num_tokens, 8 * num_tokens, 6, 5)

    def note(seconds, num_tokens, **kwargs):
        clock.now = seconds
        meter.note([EngineLoad("rollout-0", counts_of(num_tokens), 2, 7, 0.5)], **kwargs)

    note(4.9, 90)
    assert events.all == []
    note(6.0, 100)
    note(10.0, 150)
    note(12.0, 160)
    note(17.0, 40)  # it was started again
    note(18.0, 45, last=True)
    found = [(event["seconds"], event["num_tokens"]) for event in events.of("load")]
    assert found == [(6.0, 100), (6.0, 60), (5.0, 40), (1.0, 5)]
    assert events.of("load")[0] == {
        "seconds": 6.0, "id": "rollout-0", "num_tokens": 100, "num_given": 1000,
        "num_cached": 800, "num_media": 6, "num_media_cached": 5, "in_flight": 2, "version": 7,
        "kv_used": 0.5,
    }  # fmt: skip
    assert [event["num_given"] for event in events.of("load")] == [1000, 600, 400, 50]
    assert [event["num_media"] for event in events.of("load")] == [6, 0, 6, 0]


def test_a_fixed_pool_serves_as_it_was_loaded_and_no_roster_or_other_pool_counts(sampler_of):
    sampler, paths = sampler_of(own=None, name="judge", engines__judge__count=2)
    for name, pool in (("judge-0", "judge"), ("judge-1", "judge"), ("rollout-0", "rollout")):
        members.announce(paths, Member(name, "1", "http://x", 1, "embedded", "HEALTHY", pool=pool))
    Roster(4, {"rollout-0": RosterEntry("1", 4, "ACTIVE")}).write(paths)
    assert asyncio.run(sampler._look()) is False
    assert sampler._pool.states == {at("judge-0"): "serving", at("judge-1"): "serving"}
    announce(paths, "judge-1", state="STARTING")  # what has that name says it is of rollout's
    asyncio.run(sampler._look())
    assert sampler._pool.states == {at("judge-0"): "serving"}
