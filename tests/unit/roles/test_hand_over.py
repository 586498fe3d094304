"""A response that goes on at another engine keeps what was asked for it."""

import asyncio
from types import SimpleNamespace

import pytest

from relax_hpc.errors import EngineError, EngineLostError
from relax_hpc.inference import pool as pool_module
from relax_hpc.inference.generation import Load, Sampling
from relax_hpc.inference.pool import Endpoint, Pool
from relax_hpc.schema import FinishReason

SAMPLING = Sampling(0.7, 8, (2,))


class Client:
    """Samples two tokens a call, and is lost or done after that."""

    heard_at = heard_version = num_tokens = 0

    def __init__(self, at, asked):
        self.at, self.asked, self.now = at, asked, int(at.id[-1])

    async def version(self):
        return self.now

    async def sample(self, prompt, seed, sampling, *, version, draft, rid, computed):
        self.asked.append((self.at.id, prompt, seed, sampling, version, list(draft.token_ids)))
        draft.token_ids += [self.now] * 2
        if len(self.asked) == 1:
            raise EngineLostError("gone")
        return SimpleNamespace(finish=FinishReason.STOP, token_ids=draft.token_ids)

    async def aclose(self):
        pass


async def test_the_oldest_policy_that_is_allowed_and_the_tokens_so_far_go_with_a_response():
    """Engine e5 is lost; e3 is idle, but older than allowed; e4 becomes free later."""
    asked = []

    pool = Pool(lambda at: Client(at, asked), max_in_flight=4, patience_s=20)
    ends = {name: Endpoint(name, "0", f"http://{name}", "t") for name in ("e3", "e4", "e5")}
    pool.enlist({ends["e3"]: "serving", ends["e4"]: "held", ends["e5"]: "serving"})
    task = asyncio.create_task(pool.sample([7, 8], 9, SAMPLING._replace(min_version=4)))
    while not asked:
        await asyncio.sleep(0.001)
    pool.enlist({ends["e3"]: "serving", ends["e4"]: "held"})
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()
    pool.enlist({ends["e3"]: "serving", ends["e4"]: "serving"})
    done = await asyncio.wait_for(task, 20)
    await pool.aclose()
    assert done.token_ids == [5, 5, 4, 4]
    wanted = SAMPLING._replace(min_version=4)
    assert asked == [("e5", [7, 8], 9, wanted, 5, []), ("e4", [7, 8], 9, wanted, 4, [5, 5])]


async def test_one_that_answers_nothing_holds_up_neither_the_others_nor_who_asks_how_all_are(
    monkeypatch,
):
    monkeypatch.setattr(pool_module, "_ANSWER_S", 0.05)
    asked, loads = [None], []

    class Hangs(Client):
        async def version(self):
            await asyncio.sleep(60 * (self.at.id == "e9"))
            return self.now

        async def load(self):
            loads.append(self.at.id)
            await asyncio.sleep(60 * (self.at.id == "e9"))
            return Load(0, 0, 1.0)

    pool = Pool(lambda at: Hangs(at, asked), max_in_flight=10, patience_s=60)
    first = asyncio.create_task(pool.sample([1], 1, SAMPLING))
    ends = [Endpoint(name, "0", f"http://{name}", "t") for name in ("e1", "e9")]
    pool.enlist(dict.fromkeys(ends, "serving"))
    async with asyncio.timeout(10):
        await first
        assert await pool.version() == 1
        while "e9" not in loads:
            await pool.adapt()
            await asyncio.sleep(0.01)
    await pool.aclose()
    assert [name for name, *_ in asked[1:]] == ["e1"]


async def test_patience_begins_anew_while_engines_are_excused():
    pool = Pool(lambda at: Client(at, [None]), max_in_flight=4, patience_s=0.4)
    waits = asyncio.create_task(pool.sample([1], 1, SAMPLING))
    for _ in range(10):
        await asyncio.sleep(0.1)
        pool.excuse()
    assert not waits.done()
    with pytest.raises(EngineError, match=r"for 0\.4 s"):
        await asyncio.wait_for(waits, 10)
    await pool.aclose()


async def test_an_episode_stays_where_it_was_taken_to_and_needs_no_entry_beside_its_prompt():
    """Two of three siblings find room where their prompt is; the third comes back next door."""
    asked = [None]

    class Waits(Client):
        async def sample(self, prompt, seed, sampling, **others):
            done = await super().sample(prompt, seed, sampling, **others)
            await gate.wait()
            return done

    gate = asyncio.Event()
    pool = Pool(lambda at: Waits(at, asked), max_in_flight=2, patience_s=20)
    pool.enlist({Endpoint(name, "0", "http://x", "t"): "serving" for name in ("e4", "e5")})

    def ask(episode):
        given = pool.sample([1], episode, SAMPLING, homes=(("p", episode), "p"))
        return asyncio.create_task(given)

    for _ in range(2):
        tasks = [ask(episode) for episode in range(3)]
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*tasks)
    known = list(pool._homes)
    await pool.aclose()
    assert known == ["p", ("p", 2)]
    served = [(name, seed) for name, _, seed, *_ in asked[1:]]
    (home, _), (_, _), (next_door, _) = served[:3]
    assert home != next_door
    assert served == [(home, 0), (home, 1), (next_door, 2)] * 2
