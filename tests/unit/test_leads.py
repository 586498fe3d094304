"""A long prefix is computed once: siblings wait for the first of them."""

import asyncio

import pytest

from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.errors import EngineError, EngineLostError
from relax_hpc.inference.generation import Counts, Draft, ReplyAssembler, Sampling
from relax_hpc.inference.pool import Endpoint, Leads, Pool
from relax_hpc.schema import FinishReason

LONG, SHORT = [1] * 1024, [1] * 1023


class Engine:
    """Notes who asks it when, and gives way when told to."""

    def __init__(self):
        self.begun, self.counts = [], Counts()
        self.go = asyncio.Event()
        self.heard_version, self.heard_at = 0, float("inf")
        self.refuse = []

    async def version(self):
        return 0

    async def aclose(self):
        pass

    async def sample(self, prompt, seed, sampling, *, version, draft, rid, computed):
        self.begun.append(seed)
        if self.refuse:
            raise self.refuse.pop()
        await self.go.wait()
        draft.take([7], [-0.5])
        computed()
        await asyncio.sleep(0)
        return draft.finish(FinishReason.LENGTH)


async def run(prompt, homes=("group",), refuse=(), view=None):
    """Seeds of those that were asked before the first was through the prompt, and of all."""
    engine = Engine()
    engine.refuse += refuse
    pool = Pool(lambda at: engine, max_in_flight=8, patience_s=20)
    pool.enlist({Endpoint("e", "0", "http://x", ""): "serving"})
    how = Sampling(1.0, 1, view=view)
    tasks = [
        asyncio.ensure_future(pool.sample(prompt, seed, how, homes=homes)) for seed in range(3)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    before = list(engine.begun)
    engine.go.set()
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    later = await pool.sample(prompt, 9, how, homes=homes)
    await pool.aclose()
    return before, engine.begun, [*found, later]


async def test_siblings_of_a_long_prompt_wait_until_the_first_has_been_through_it():
    before, begun, found = await run(LONG)
    assert (before, begun) == ([0], [0, 1, 2, 9])
    assert [each.token_ids for each in found] == [[7]] * 4


@pytest.mark.parametrize(
    ("prompt", "homes", "view", "asked"),
    [
        (SHORT, ("group",), None, [0, 1, 2]),
        (LONG, (), None, [0, 1, 2]),
        (LONG, ("episode", "group"), None, [0]),
        ([1, 2], ("group",), MediaView((), ()), [0]),  # however few tokens they have
    ],
)
async def test_a_long_prompt_or_media_that_are_shared_are_waited_for(prompt, homes, view, asked):
    assert (await run(prompt, homes, view=view))[0] == asked


async def test_one_that_is_refused_lets_the_next_go_first_and_one_whose_engine_is_lost_goes_on():
    before, begun, found = await run(LONG, refuse=[EngineError("no")])
    assert before == [0, 1, 2], "the engine is known by then, and nothing is waited for"
    assert isinstance(found[0], EngineError) and found[1].token_ids == [7]
    assert begun == [0, 1, 2, 9]
    _, begun, found = await run(LONG, refuse=[EngineLostError("gone")])
    assert sorted(begun) == [0, 0, 1, 2, 9]
    assert [each.token_ids for each in found] == [[7]] * 4


async def test_one_that_is_cancelled_before_it_began_hands_the_lead_on():
    leads, led = Leads(lambda prefix: False), []

    async def ask(name):
        async with leads.turn("p") as computed:
            led.append(name)
            await asyncio.sleep(3600 if name == 0 else 0)
            computed()
            computed()

    tasks = [asyncio.ensure_future(ask(name)) for name in range(3)]
    await asyncio.sleep(0.01)
    assert led == [0]
    tasks[0].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks[1:]), 10)
    assert (led, leads._led) == ([0, 1, 2], {})


def reply(cached, view=None):
    told = ReplyAssembler("http://x/generate", Draft(), 100)
    logprobs = [[-0.5, 7, None]]
    of = {"completion_tokens": 1, "output_token_logprobs": logprobs, "weight_version": "0"}
    told.add({"meta_info": of | {"cached_tokens": cached}})
    return told.count_given(view)


def test_a_medium_counts_as_cached_if_no_token_of_it_was_computed(tmp_path):
    def medium():
        return Spooled(Extent("image", (20,)), bytes(16), tmp_path)

    # The second is shown in two stretches, as a video's frames are.
    spans = (MediaSpan(0, 10, 20), MediaSpan(1, 40, 10), MediaSpan(1, 60, 10))
    view = MediaView((medium(), medium()), spans)
    assert reply(29, view) == Counts(0, 100, 29, 2, 0)
    assert reply(30, view) == Counts(0, 100, 30, 2, 1)
    assert reply(69, view) == Counts(0, 100, 69, 2, 1)
    assert reply(70, view) == Counts(0, 100, 70, 2, 2)
    assert reply(99) == Counts(0, 100, 99, 0, 0)
