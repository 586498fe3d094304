"""A response that goes on at another engine keeps what was asked for it."""

import asyncio
from types import SimpleNamespace

from relax_hpc.engines.generation import Sampling
from relax_hpc.engines.pool import Endpoint, Pool
from relax_hpc.errors import EngineLostError
from relax_hpc.schema import FinishReason

SAMPLING = Sampling(0.7, 8, (2,))


class Client:
    """Samples two tokens a call, and is lost or done after that."""

    heard_at = heard_version = num_tokens = 0

    def __init__(self, at, asked):
        self.at, self.asked, self.now = at, asked, int(at.id[-1])

    async def version(self):
        return self.now

    async def sample(self, prompt, seed, sampling, *, version, draft, rid):
        self.asked.append((self.at.id, prompt, seed, sampling, version, list(draft.token_ids)))
        draft.token_ids += [self.now] * 2
        if len(self.asked) == 1:
            raise EngineLostError("gone")
        return SimpleNamespace(finish=FinishReason.STOP, token_ids=draft.token_ids)

    def close(self):
        pass


def test_the_oldest_policy_that_is_allowed_and_the_tokens_so_far_go_with_a_response():
    """Engine e5 is lost; e3 is idle, but older than allowed; e4 becomes free later."""
    asked = []

    async def run():
        pool = Pool(lambda at: Client(at, asked), max_in_flight=4, patience_s=20)
        ends = {name: Endpoint(name, "0", f"http://{name}", "t") for name in ("e3", "e4", "e5")}
        pool.enlist({ends["e3"]: "serving", ends["e4"]: "held", ends["e5"]: "serving"})
        task = asyncio.create_task(pool.sample([7, 8], 9, SAMPLING, min_version=4))
        while not asked:
            await asyncio.sleep(0.001)
        pool.enlist({ends["e3"]: "serving", ends["e4"]: "held"})
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not task.done()
        for _ in range(2):  # as every second; a newcomer is asked for its version between them
            pool.enlist({ends["e3"]: "serving", ends["e4"]: "serving"})
            await pool.version()
        done = await asyncio.wait_for(task, 20)
        await pool.aclose()
        return done

    assert asyncio.run(run()).token_ids == [5, 5, 4, 4]
    assert asked == [
        ("e5", [7, 8], 9, SAMPLING, 5, []),
        ("e4", [7, 8], 9, SAMPLING, 4, [5, 5]),
    ]
