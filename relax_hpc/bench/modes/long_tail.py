"""Responses whose lengths are drawn from one distribution, the same for who samples when.

Log-normal, with sigma 0.89 as of reasoning at 16k tokens: the 99th percentile is 16/3 of the mean,
and that is the run's limit, at which the longest are cut. So a limit of 16,384 has a mean of 3,072
(3,004 once cut).
"""

import hashlib
import math
from statistics import NormalDist

from relax_hpc.environments.base import Outcome
from relax_hpc.environments.session import Session
from relax_hpc.prompts.source import Prompt

SIGMA = 0.89
LIMIT_IN_MEANS = 16 / 3
"""Limit of a response, which is the 99th percentile, in means."""
_BITS = 52


def limit_of(mean: float) -> int:
    """Returns `rollout.max_new_tokens` for lengths of that mean."""
    return max(1, round(mean * LIMIT_IN_MEANS))


def draw(seed: int, limit: int) -> int:
    """The tokens of a response, 1 to `limit`.

    Args:
        seed: of the episode, which follows from the run's seed, guid and sibling.
        limit: of any response.
    """
    digest = hashlib.sha256(f"length/{seed}".encode()).digest()
    share = ((int.from_bytes(digest[:8]) >> (64 - _BITS)) + 0.5) / 2**_BITS
    median = limit / LIMIT_IN_MEANS * math.exp(-(SIGMA**2) / 2)
    return min(limit, max(1, round(median * math.exp(SIGMA * NormalDist().inv_cdf(share)))))


class LongTail:
    """An environment that asks once, for a response of the length that is drawn for the episode.

    What is longer has more reward: so siblings differ, and no group is left out of a batch.
    """

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        length = draw(session.seed, session.max_new_tokens)
        await session.chat(max_new_tokens=length, ignore_eos=True)
        return Outcome({"length": length / session.max_new_tokens})
