"""Requests that end every engine which is asked for them, as a fault of its makes them."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from fake_engines import reply, served, version_0

from relax_hpc.errors import DeadlyRequestError
from relax_hpc.inference import pool
from relax_hpc.inference.generation import Draft, GenerationClient, Sampling
from relax_hpc.inference.pool import DEADLY, Endpoint, Pool

HOW = Sampling(1.0, 4, ignore_eos=True)
POISON = 666


class Mortal:
    """Speaks as SGLang does, until a prompt has the poison: then all its connections break."""

    def __init__(self, poison=lambda tokens: POISON in tokens):
        self.poison, self.start, self.deaths, self.lies_dead = poison, 0, [], False
        self.running, self.refused = set(), 0

    def end(self):
        self.lies_dead = True
        self.deaths.append(time.monotonic())
        for transport in self.running:
            transport.abort()
        self.running.clear()

    async def version(self, request):
        if self.lies_dead:
            request.transport.abort()
        return await version_0()

    async def generate(self, request):
        tokens = (await request.json())["input_ids"]
        if self.lies_dead:
            self.refused += 1
            request.transport.abort()
            return web.Response()
        self.running.add(request.transport)
        await asyncio.sleep(0.1)  # until the first token
        if self.poison(tokens) and not self.lies_dead:
            self.end()
        if self.lies_dead:
            return web.Response()
        self.running.discard(request.transport)
        return await reply(request)


@asynccontextmanager
async def pool_of(*engines, told_after_s=0.1):
    """A pool whose engines that end are started again, which it is told."""

    def known():
        return {
            Endpoint(f"e{n}", str(engine.start), urls[n], "t"): "serving"
            for n, engine in enumerate(engines)
            if not engine.lies_dead
        }

    async def keep():
        while True:
            await asyncio.sleep(told_after_s)
            pool.enlist(known())
            for engine in engines:
                if engine.lies_dead:
                    engine.lies_dead, engine.start = False, engine.start + 1

    async with served(*engines) as urls:
        pool = Pool(lambda at: GenerationClient(at.url, at.token), max_in_flight=64, patience_s=60)
        pool.enlist(known())
        keeper = asyncio.create_task(keep())
        yield pool
        keeper.cancel()
        await pool.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool, "_PAUSE_S", 0.01)
    monkeypatch.setattr(pool, "_LONGEST_PAUSE_S", 0.3)


def answers(engines, asked):

    async def run():
        async with pool_of(*engines) as pool:
            every = asyncio.gather(
                *(
                    pool.sample(given, seed, HOW, homes=((given[0], seed), given[0]), draft=draft)
                    for given, seed, draft in asked
                ),
                return_exceptions=True,
            )
            return await asyncio.wait_for(every, 40)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 3])
def test_a_prompt_that_ends_engines_is_given_up_with_its_siblings_and_nobody_else(size):
    engines = [Mortal() for _ in range(size)]
    others = [([n], n, None) for n in range(24)]
    poisoned = [([99, POISON], 1000 + n, None) for n in range(8)]
    found = answers(engines, others + poisoned)
    assert [each.token_ids for each in found[:24]] == [[7, 8]] * 24
    for error in found[24:]:
        assert isinstance(error, DeadlyRequestError)
        assert str(error).startswith("3 engines ended when they were asked for it: e0 (0), e")
    # And no more for the siblings, though each might have cost as many; one that was sent late
    # once, after the engine had ended, ends a further one.
    assert DEADLY <= sum(len(engine.deaths) for engine in engines) <= DEADLY + 1


def test_two_that_end_engines_are_told_apart_from_each_other_and_from_who_was_beside_them():
    engine = Mortal()
    asked = [([n], n, None) for n in range(6)] + [
        ([50, POISON], 50, None),
        ([51, POISON], 51, None),
    ]
    found = answers([engine], asked)
    assert [each.token_ids for each in found[:6]] == [[7, 8]] * 6
    assert [type(each) for each in found[6:]] == [DeadlyRequestError] * 2


def test_one_that_ends_engines_in_the_middle_of_its_response_is_given_up_by_itself():
    """A sibling with another draft, or with none, is not."""
    engine = Mortal(lambda tokens: tokens[-1] == POISON)
    drafts = [Draft([4, POISON], [-1.0, -1.0], [(0, 0)]), Draft([4], [-1.0], [(0, 0)]), None]
    found = answers([engine], [([1, 2], n, draft) for n, draft in enumerate(drafts)])
    assert isinstance(found[0], DeadlyRequestError)
    assert [each.token_ids for each in found[1:]] == [[4, 7, 8], [7, 8]]


class Shy(Mortal):
    """Breaks off what it is asked first, and whatever it is asked before the others were."""

    def __init__(self, every):
        super().__init__()
        self.every, self.asked = every, 0

    async def generate(self, request):
        self.asked += 1
        if self.asked > 1 and all(each.asked for each in self.every):
            return await super().generate(request)
        request.transport.abort()
        return web.Response()


def test_engines_that_broke_off_and_are_there_have_not_ended(monkeypatch):
    monkeypatch.setattr(pool, "_KNOWN_S", 0.2)
    engines = []
    engines.extend(Shy(engines) for _ in range(DEADLY))
    (found,) = answers(engines, [([1], 1, None)])
    assert found.token_ids == [7, 8]


def test_engines_that_end_together_are_nobody_s_fault(monkeypatch):
    """As of a node: who asks the others of it, one after the other, finds them dead."""
    monkeypatch.setattr(pool, "_PAUSE_S", 0.1)  # what was heard before is forgotten by then
    engines = [Mortal() for _ in range(4)]

    async def run():
        async with pool_of(*engines, told_after_s=1.5) as pool:
            asked = asyncio.gather(*(pool.sample([n], n, HOW, homes=(n,)) for n in range(8)))
            while sum(len(engine.running) for engine in engines) < 8:
                await asyncio.sleep(0.001)
            for engine in engines:
                engine.end()
            return await asyncio.wait_for(asked, 20)

    assert [each.token_ids for each in asyncio.run(run())] == [[7, 8]] * 8
    assert sum(engine.refused for engine in engines) > 0
