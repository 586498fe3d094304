"""An engine that is much slower than the others is named."""

import asyncio
from types import SimpleNamespace

import pytest
from roles.role_fakes import config

from relax_hpc.inference import pool_client
from relax_hpc.inference.generation import Counts, Sampling
from relax_hpc.inference.pool import Endpoint, EngineLoad, Pool
from relax_hpc.inference.pool_client import SlowEngine, SlowEngines
from relax_hpc.runs import status
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runtime.paths import RunPaths


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
    events = [load("a", 2000), load("b", 2000), load("c", 2000)]
    fewer = load("d", 500, in_flight=1)
    idle = load("d", 0, in_flight=0)
    long_ago = load("c", 1, time=30.0)
    assert status.find_slow([*events, fewer, idle, long_ago]) == {}


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


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pool_client.time, "monotonic", lambda: clock.now)
    return clock


def sampled(engines, clock, seconds, in_flight=4, before=(0, 0, 0, 0), **rates):
    """Looks once a second at engines of these rates, tokens/s and request. What began to rest."""
    found = []
    start = clock.now
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


def test_a_bit_more_than_half_the_median_is_not_slow_nor_are_two_engines_or_an_idle_one(clock):
    assert sampled(SlowEngines(), clock, 90, a=50.0, b=50.0, c=26.0) == []
    engines = SlowEngines()
    idle = [EngineLoad(name, Counts(), 0 if name == "c" else 4, 1, None) for name in "abc"]
    for second in range(90):
        clock.now = float(second)
        busy = [each._replace(counts=Counts(200 * second * bool(each.in_flight))) for each in idle]
        assert engines.look(busy) == []


def test_one_that_has_fewer_requests_is_not_slow(clock):
    engines, requests = SlowEngines(), {"a": 8, "b": 8, "c": 2}
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


def at(name):
    return Endpoint(name, "0", "http://x", "t")


def other_of(name):
    return "ab".replace(name, "")


async def asked(pool, number, homes=()):
    tasks = [
        asyncio.ensure_future(pool.sample([1], n, Sampling(1.0, 1), homes=homes))
        for n in range(number)
    ]
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
        pool.enlist({at(other_of(home)): "held", at(home): "serving"})
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
        return home, seen

    home, seen = asyncio.run(run())
    other = other_of(home)
    assert seen == [{home: 1, other: 3}, {home: 4, other: 3}, 10]
