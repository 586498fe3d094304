"""Which engines a rollout task asks, how, what it notes of them, and what ends a reply."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from episode_fakes import Numbers, answer, episodes
from roles.role_fakes import Events, config

from relax_hpc.data.conversation import StopTexts
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.session import Session
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.inference import members, pool_client, switches
from relax_hpc.inference.generation import Counts, Draft, Sampling
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.pool import Endpoint, EngineLoad, Pool
from relax_hpc.inference.pool_client import LoadMeter, SlowEngine, SlowEngines, client_of
from relax_hpc.runs import status
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runtime.comm.orders import Receipt
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import FinishReason

SECRET = RunSecret(bytes(32))


class FakePool:
    """Answers a prompt and a seed with both."""

    loads, is_excused = (), False

    def __init__(self, connect, **settings):
        self.asked, self.now = [], 3

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
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pool_client.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def sampler_of(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_client, "Pool", FakePool)

    def make(own=("rollout-0",), name="rollout", **settings):
        paths = RunPaths(tmp_path)
        monkeypatch.setattr(pool_client.RunSecret, "read", lambda path: SECRET)
        made = client_of(config(**settings), paths, name, own=own, stop_token=99, events=Events())
        return made, paths

    return make


def test_engines_are_asked_as_the_episode_says_and_the_draft_is_the_callers(sampler_of):
    sampler, _ = sampler_of()
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


def test_a_task_gives_up_when_for_too_long_no_engine_had_the_newest_weights(sampler_of, clock):
    sampler, _ = sampler_of(launch__advanced__peer_timeout_s=10)
    clock.now = 108.0
    assert asyncio.run(sampler.version()) == 3
    sampler._pool.now = None
    clock.now = 118.0
    assert asyncio.run(sampler.version()) is None
    clock.now = 118.5
    with pytest.raises(PeerTimeoutError, match=r"rollout-0: no engine .* for 10 s"):
        asyncio.run(sampler.version())


def announce(paths, name, url="http://x", state="HEALTHY", **more):
    members.announce(paths, Member(name, "1", url, 1, "embedded", state, **more))


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
    "settings",  # of the second the trainer begins with these, not the folder's
    [{"weights__quantize": "fp8", "engines__rollout__kind": "sglang"}, {"model__weights": "other"}],
)
def test_an_engine_that_begins_without_the_policy_is_held_until_given_it(sampler_of, settings):
    sampler, paths = sampler_of(**settings)
    announce(paths, "rollout-0")
    asyncio.run(sampler._look())
    assert sampler._pool.states == {at("rollout-0"): "held"}


def test_while_engines_sleep_for_the_trainer_nobody_loses_patience(sampler_of, clock):
    sampler, paths = sampler_of(launch__advanced__peer_timeout_s=10)
    sampler._pool.now = None
    Roster(4, {"rollout-0": RosterEntry("1", 4, "ASLEEP")}).write(paths)
    clock.now = 500.0
    assert asyncio.run(sampler._look()) is True
    assert asyncio.run(sampler.version()) is None
    assert sampler._pool.is_excused


def test_environments_that_keep_the_threads_of_the_loop_busy_hold_up_no_look(sampler_of):
    sampler, paths = sampler_of()
    announce(paths, "rollout-0")
    end = threading.Event()

    async def run():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(end.wait, 60))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(sampler._look(), 10)
        finally:
            end.set()
            await busy

    asyncio.run(run())
    assert list(sampler._pool.states) == [at("rollout-0")]


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


def test_loads_are_noted_now_and_then_as_what_came_since_also_after_a_restart(clock):
    events = Events()
    meter = LoadMeter(events)

    def note(seconds, num_tokens, **kwargs):
        clock.now = seconds
        counts = Counts(num_tokens, 10 * num_tokens, 8 * num_tokens, 6, 5)
        meter.note([EngineLoad("rollout-0", counts, 2, 7, 0.5)], **kwargs)

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
    assert [event["num_media"] for event in events.of("load")] == [6, 0, 6, 0]


def test_a_fixed_pool_serves_as_it_was_loaded_and_no_roster_or_other_pool_counts(sampler_of):
    sampler, paths = sampler_of(own=None, name="judge", engines__judge__count=2)
    for name, pool in (("judge-0", "judge"), ("judge-1", "judge"), ("rollout-0", "rollout")):
        announce(paths, name, pool=pool)
    Roster(4, {"rollout-0": RosterEntry("1", 4, "ACTIVE")}).write(paths)
    assert asyncio.run(sampler._look()) is False
    assert sampler._pool.states == {at("judge-0"): "serving", at("judge-1"): "serving"}
    announce(paths, "judge-1", state="STARTING")  # what has that name says it is of rollout's
    asyncio.run(sampler._look())
    assert sampler._pool.states == {at("judge-0"): "serving"}


def load(name, num_tokens, time=100.0, in_flight=4, seconds=5.0):
    return {"event": "load", "time": time, "id": name, "num_tokens": num_tokens,
            "in_flight": in_flight, "seconds": seconds}  # fmt: skip


def test_an_engine_below_half_the_median_is_slow():
    events = [load("a", 2000), load("b", 2200), load("c", 900), load("d", 1200)]
    assert status.find_slow(events) == {}, "half of 80 is 40, and c has 45"
    events.append(load("c", 200))
    said = "slow: 27.5 tokens/s per request, the median engine 80"
    assert status.find_slow(events) == {"c": said}


def test_fewer_requests_or_none_or_a_bad_minute_long_ago_are_not_slow():
    events = [load(name, 2000) for name in "abc"]
    events += [load("d", 500, in_flight=1), load("d", 0, in_flight=0), load("c", 1, time=30.0)]
    assert status.find_slow(events) == {}


def test_engines_that_were_removed_are_no_measure_of_those_that_stay(tmp_path):  # U9
    """Of three that told their load in the last minute two are gone: nobody is slow of one."""
    paths = RunPaths(tmp_path)
    gone = [Extra(f"extra-{n}", 1, "n1", n, "GONE", 0.0, "removed") for n in (1, 2)]
    ScaleState("7.0", 1, ["n1"], 2, extras={each.id: each for each in gone}).write(paths)
    events = [load("rollout-0", 900), load("extra-1", 4000), load("extra-2", 4000)]
    assert "rollout-0" in status.find_slow(events)
    rows = status.list_engines(paths, config(), "RUNNING", events)
    assert {row.id: row.reason for row in rows if row.state != "GONE"} == {"rollout-0": ""}


def test_one_that_rests_is_named_until_its_time_is_over():
    rests = {"event": "rests", "time": 100.0, "id": "c", "rate": 9.0, "median": 80.0,
             "seconds": 600.0}  # fmt: skip
    said = "slow: 9 tokens/s per request, the median engine 80; a task asks nothing new of it"
    later = load("a", 2000, time=690.0)
    assert status.find_slow([rests, later]) == {"c": said}
    assert status.find_slow([rests, load("a", 2000, time=701.0)]) == {}


def sampled(engines, clock, seconds, in_flight=4, before=(0, 0, 0, 0), **rates):
    """Looks once a second at engines of these rates, tokens/s and request. What began to rest."""
    found, start = [], clock.now
    for second in range(1, seconds + 1):
        clock.now = start + second
        loads = [
            EngineLoad(name, Counts(int(first + rate * in_flight * second)), in_flight, 1, None)
            for (name, rate), first in zip(rates.items(), before, strict=False)
        ]
        found += [(clock.now, each) for each in engines.look(loads)]
    return found


def test_an_engine_that_is_slow_for_half_a_minute_rests_for_ten(clock):
    engines = SlowEngines()
    begun = sampled(engines, clock, 40, a=50.0, b=52.0, c=24.0, d=51.0)
    [(when, found)] = begun
    # The first look only begins to count: 30 s later there are 31 looks.
    assert when == 32.0 and found.id == "c"
    assert found == SlowEngine("c", pytest.approx(24.0), pytest.approx(50.5))
    assert engines.resting == {"c"}
    assert sampled(engines, clock, 591, a=50.0, b=52.0, c=0.0, d=51.0) == []
    assert clock.now == 631.0 and engines.resting == {"c"}
    sampled(engines, clock, 1, a=50.0, b=52.0, c=0.0, d=51.0)
    assert engines.resting == set(), "it is tried again"


@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_bit_more_than_half_the_median_or_fewer_requests_or_none_are_not_slow(clock, in_flight):
    assert sampled(SlowEngines(), clock, 90, a=50.0, b=50.0, c=26.0) == []
    engines, requests = SlowEngines(), {"a": 8, "b": 8, "c": in_flight}
    for second in range(90):
        clock.now = float(second)
        loads = [EngineLoad(n, Counts(50 * k * second), k, 1, None) for n, k in requests.items()]
        assert engines.look(loads) == []


def test_one_that_is_started_again_begins_anew(clock):
    engines = SlowEngines()
    assert sampled(engines, clock, 25, a=50.0, b=50.0, c=10.0) == []
    after = (5000, 5000, 0)
    assert sampled(engines, clock, 25, before=after, a=50.0, b=50.0, c=50.0) == []


class Silent:
    """An engine that is never done."""

    heard_version, heard_at, counts = 1, float("inf"), Counts()

    async def sample(self, prompt, seed, sampling, **_):
        await asyncio.sleep(3600)

    async def aclose(self):
        pass


async def asked(pool, number, homes=()):
    how = Sampling(1.0, 1)
    tasks = [asyncio.ensure_future(pool.sample([1], n, how, homes=homes)) for n in range(number)]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def test_what_rests_gets_nothing_new_though_a_prompt_is_at_home_there():
    async def run():
        pool = Pool(lambda _: Silent(), max_in_flight=8, patience_s=20)
        pool.enlist({at("a"): "serving", at("b"): "serving"})
        tasks = await asked(pool, 1, homes=("prompt",))
        [home] = [name for name, count in pool.in_flight.items() if count]
        pool.rest({home})
        tasks += await asked(pool, 3, homes=("prompt",))
        seen = [dict(pool.in_flight)]
        pool.rest(())
        tasks += await asked(pool, 3, homes=("prompt",))
        seen.append(dict(pool.in_flight))
        [other] = {"a", "b"} - {home}
        pool.enlist({at(other): "held", at(home): "serving"})
        pool.rest({home})
        tasks += await asked(pool, 1)
        assert sum(pool.in_flight.values()) == 7, "the other one is back after an update"
        pool.enlist({at("a"): "serving", at("b"): "serving"})
        assert pool.in_flight[home] == 4 and sum(pool.in_flight.values()) == 8
        pool.rest({"a", "b"})  # somebody has to
        tasks += await asked(pool, 2)
        seen.append(sum(pool.in_flight.values()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.aclose()
        assert seen == [{home: 1, other: 3}, {home: 4, other: 3}, 10]

    asyncio.run(run())


def member_of(start):
    return Member("rollout-0", start, "", 1, "sglang", "HEALTHY")


@pytest.mark.parametrize("every", [1, 3, 7])
def test_an_engine_that_skips_versions_leaves_no_more_than_one_that_does_not(tmp_path, every):
    paths = RunPaths(tmp_path)
    for begin in (0, 100):  # a trainer may be started again
        notes = switches.Notes(paths)
        for version in range(begin, begin + 50, every):
            notes.note(member_of("1.0-1-1"), version, [Receipt(num_sampled={"a": version})])
    left = sorted(int(each.stem) for each in paths.switches("rollout-0").glob("*/*.json"))
    assert left and left[0] > left[-1] - switches._KEPT
    seen = switches.Switches(paths, "rollout-0", "1.0-1-1")
    assert asyncio.run(seen.between(left[-2], left[-1])) == {left[-1]: {"a": left[-1]}}


def test_many_starts_of_an_engine_leave_what_one_does(tmp_path):
    paths = RunPaths(tmp_path)
    notes = switches.Notes(paths)
    switches.forget_earlier(paths, "rollout-0")
    for start in range(40):
        switches.forget_earlier(paths, "rollout-0")
        notes.note(member_of(f"1.{start}-1-1"), start, [])
        notes.note(member_of("1.0-1-1")._replace(id="rollout-0.1"), start, [])
    assert [each.name for each in paths.switches("rollout-0").iterdir()] == ["1.39-1-1"]
    assert len([*paths.switches("rollout-0.1").glob("*/*.json")]) == switches._KEPT


PROMPT = Prompt(0, [7], "", [{"role": "user", "content": "7"}], where="a test")


def ends_of(*stops, **said):
    """The ends that an engine is told, of a reply for each of these `stop`s of an environment."""
    found = []

    class Engine:
        async def sample(self, given, draft, how, *, seed, homes):
            found.append(how.end)
            return answer(draft, [3], [-1.0], [(0, 0)])

    async def run(stop):
        how = Sampling(1.0, 50, max_tokens=1000, end=Numbers().stop(["run"]))
        given = PROMPT, EpisodeRecord(), Engine(), Numbers(), how
        made = Session(*given, group=0, episode=0, seed=1)
        await made.chat(stop=stop, **said)

    for stop in stops:
        asyncio.run(run(stop))
    return found


def ending(end):
    return end and end._texts


def test_a_reply_ends_with_a_text_of_the_run_unless_the_environment_says_others():
    assert list(map(ending, ends_of(None, ["</a>", "b"], []))) == [("run",), ("</a>", "b"), None]
    assert list(map(ending, ends_of(None, ["b"], ignore_eos=True))) == [None, ("b",)]


def test_a_held_out_set_stops_as_training_does_unless_it_says_otherwise():
    sets = {"as": {}, "none": {"stop": []}, "own": {"stop": ["b"]}}
    sets = {name: each | {"path": "p"} for name, each in sets.items()}
    made = config(rollout__stop=["run"], eval=sets)
    each = episodes(made, None, None)
    assert ending(each.how(1.0).end) == ("run",)
    ends = {name: ending(each.how_heldout(settings).end) for name, settings in made.eval.items()}
    assert ends == {"as": ("run",), "none": None, "own": ("b",)}
    assert episodes(config(), None, None).how(1.0).end is None


def test_experts_of_a_reply_that_is_cut_are_on_no_record():
    """Those that came with a part of it before it was broken off are of other tokens."""
    draft = Draft([1, 2, 3, 4], [-1.0] * 4, [(0, 5)], [np.zeros((3, 2), np.int16)])
    draft.cut(2)
    made = draft.finish(FinishReason.STOP)
    assert (made.token_ids, made.routed_experts) == ([1, 2], None)


PIECES = ["a", "\n", "Q", ":", "", "\nQ", ": b", "<|end|>"]


def end_by_chunks(stop, token_ids, size):
    """The end as a client asks for it, chunk by chunk."""
    for seen in range(0, len(token_ids), size):
        if (end := stop(token_ids[: seen + size], seen)) is not None:
            return end
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("texts", "token_ids", "end"),
    [
        (["\nQ:"], [0, 1, 2, 3, 0, 0], 4),
        (["\nQ:"], [0, 5, 6, 0], 3),  # in the middle of a token, which is kept
        (["\nQ:"], [0, 5, 4, 4, 3, 0], 5),  # some tokens show nothing
        (["\nQ:"], [0, 5, 0, 3], None),
        (["\nQ:", "aa"], [1, 0, 0, 1, 2, 3], 3),  # the first to come
        (["<|end|>"], [0, 7], 2),
        (["a", "x" * 90], [0, 0, 0], 1),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(texts, token_ids, end, size):
    stop = StopTexts(lambda ids: "".join(PIECES[token] for token in ids), texts)
    assert end_by_chunks(stop, [1] * 100 + token_ids, size) == (end and 100 + end)
