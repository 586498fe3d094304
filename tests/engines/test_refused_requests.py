"""Requests that engines answer with an error of their own, or with nothing, again and again."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from fake_engines import listening, reply, served

from relax_hpc.errors import EngineError, EngineFaultError
from relax_hpc.inference import pool
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.pool import Endpoint, Pool

HOW = Sampling(1.0, 2, ignore_eos=True)
POISON, LONG = 666, 1


class Engine:
    """`answer` of a seed is an HTTP status, or how a reply ends at once."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def generate(self, request):
        seed = (await request.json())["sampling_params"]["sampling_seed"]
        self.asked.append((seed, time.monotonic()))
        what = self.answer(seed)
        if isinstance(what, int):
            return web.Response(status=what, text="CUDA error: of this prompt")
        if seed == LONG:
            await asyncio.sleep(30)
        return await reply(request, what)

    def times(self, seed):
        return [at for each, at in self.asked if each == seed]


def done(_):
    return "length"


@asynccontextmanager
async def pool_of(*engines):
    async with served(*engines) as urls:
        pool = Pool(lambda at: GenerationClient(at.url, at.token), max_in_flight=8, patience_s=60)
        pool.enlist({Endpoint(f"e{n}", "0", url, "t"): "serving" for n, url in enumerate(urls)})
        yield pool
        await pool.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool, "_PAUSE_S", 0.01)
    monkeypatch.setattr(pool, "_LONGEST_PAUSE_S", 0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_that_engines_fail_at_ends_while_others_go_on_and_says_why(size):
    engines = [Engine(lambda seed: 500 if seed == POISON else done(seed)) for _ in range(size)]

    async def run():
        async with pool_of(*engines) as pool:
            other = asyncio.create_task(pool.sample([1], LONG, HOW))
            with pytest.raises(EngineError) as found:
                await asyncio.wait_for(pool.sample([1, 2], POISON, HOW), 20)
            assert (await pool.sample([3], 3, HOW)).token_ids == [7, 8]
            assert not other.done()
            other.cancel()
            return str(found.value)

    said = asyncio.run(run())
    names = ", ".join(f"e{number}" for number in range(size))
    assert "/generate: HTTP 500: CUDA error: of this prompt" in said
    assert said.endswith(f"no token in 16 answers of {names}")
    assert sum(len(engine.times(POISON)) for engine in engines) == pool.MOST_FAULTS


def test_one_engine_that_fails_is_not_the_fault_of_a_request_that_others_may_take(monkeypatch):
    """The other one is full, and comes back later; what is sampled counts anew."""
    monkeypatch.setattr(pool, "MOST_FAULTS", 3)
    bad, good = Engine(lambda _: 500), Engine(done)

    async def run():
        async with pool_of(bad, good) as pool:
            others = [asyncio.create_task(pool.sample([1], LONG, HOW)) for _ in range(8)]
            while len(good.asked) < 8:
                await asyncio.sleep(0.01)
            asked = asyncio.create_task(pool.sample([2], 2, HOW))
            while len(bad.times(2)) < 6 and not asked.done():
                await asyncio.sleep(0.01)
            for other in others:
                other.cancel()
            return await asyncio.wait_for(asked, 20)

    assert asyncio.run(run()).token_ids == [7, 8]


def test_an_engine_that_breaks_off_at_once_is_asked_again_after_a_pause_and_not_for_ever():
    engine = Engine(lambda _: "abort")

    async def run():
        async with pool_of(engine) as pool:
            with pytest.raises(EngineError, match="aborted; no token in 16 answers of e0"):
                await asyncio.wait_for(pool.sample([1], 2, HOW), 20)

    asyncio.run(run())
    times = engine.times(2)
    assert min(later - at for at, later in itertools.pairwise(times)) >= 0.009
    assert times[-1] - times[0] >= 0.05 * 10


@pytest.mark.parametrize("said", ['data: {"x": 1}', "data: {not json", "data: []"])
def test_replies_that_cannot_be_read_are_named_and_end_nothing_else(said):

    async def answer(_):
        return web.Response(text=f"{said}\n\n")

    async def run():
        routes = [web.get("/{any:.*}", answer), web.post("/generate", answer)]
        async with listening(*routes) as url, GenerationClient(url, "t") as client:
            for asked, path in (
                (client.version(), "/model_info"),
                (client.load(), "/v1/loads"),
                (client.sample([1], 2, HOW, version=0), "/generate"),
            ):
                with pytest.raises(EngineFaultError, match=f"^{url}{path}.*: a reply that cannot"):
                    await asked

    asyncio.run(run())


def test_what_keeps_room_from_being_given_is_told_to_those_who_wait_for_it():

    def broken(*_):
        raise ZeroDivisionError("a fault of ours")

    async def run():
        async with pool_of(Engine(done)) as pool:
            known = {engine.endpoint: "serving" for engine in pool._engines.values()}
            pool.enlist({})
            asked = [asyncio.create_task(pool.sample([1], seed, HOW)) for seed in (2, 3)]
            await asyncio.sleep(0.05)
            pool._choose = broken
            pool.enlist(known)
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)

    assert [type(error) for error in asyncio.run(run())] == [ZeroDivisionError] * 2
