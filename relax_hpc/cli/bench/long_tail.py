"""An environment with long-tailed response lengths, the same in each mode."""

import hashlib
import math
from pathlib import Path
from statistics import NormalDist
from typing import ClassVar, NamedTuple

from relax_hpc.data.source import Prompt
from relax_hpc.environments.session import Outcome, Session
from relax_hpc.errors import ConfigError

_P99 = NormalDist().inv_cdf(0.99)
_BITS = 52
_FILE = '''"""Written by `relax-hpc bench modes`: log-normal with sigma {sigma:.3f}."""

from relax_hpc.cli.bench.long_tail import LengthDistribution, LongTail


class Drawn(LongTail):
    lengths = LengthDistribution(mean={mean!r}, p99={p99!r})
'''


class LengthDistribution(NamedTuple):
    """Log-normal numbers of tokens, cut at their 99th percentile, which is the run's limit.

    A mean of 3,072 and a percentile of 16,384 have sigma 0.89; after the cut the mean is 3,004.
    """

    mean: float
    """Before the cut."""
    p99: int
    """The 99th percentile, and the longest response."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm.

        Raises:
            ConfigError: no distribution has these two.
        """
        spread = math.log(self.p99 / self.mean)
        if not 0 < spread <= _P99**2 / 2:
            most = math.floor(self.mean * math.exp(_P99**2 / 2))
            raise ConfigError(
                f"--p99 {self.p99}: no log-normal distribution has it with --mean {self.mean:g}; "
                f"use one above the mean, up to {most}"
            )
        return _P99 - math.sqrt(_P99**2 - 2 * spread)

    def quantile(self, share: float) -> int:
        """Returns the length below which this share of the responses is, 0 < share < 1."""
        sigma = self.sigma
        found = self.mean * math.exp(sigma * NormalDist().inv_cdf(share) - sigma**2 / 2)
        return min(self.p99, max(1, round(found)))

    def draw(self, seed: int) -> int:
        """Returns the length of the episode with this seed, from the run's seed, guid and
        sibling."""
        digest = hashlib.sha256(f"length/{seed}".encode()).digest()
        return self.quantile(((int.from_bytes(digest[:8]) >> (64 - _BITS)) + 0.5) / 2**_BITS)

    def write(self, folder: Path) -> str:
        """Writes the environment of these lengths; returns `rollout.environment`.

        Raises:
            ConfigError: there are no such lengths.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.absolute() / "lengths.py"
        path.write_text(
            _FILE.format(mean=self.mean, p99=self.p99, sigma=self.sigma), encoding="utf-8"
        )
        return f"{path}:Drawn"


class LongTail:
    """Asks once, for a response of the episode's drawn length.

    Longer ones get more reward, so siblings differ, and no group is left out of a batch.
    """

    lengths: ClassVar[LengthDistribution]

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        length = self.lengths.draw(session.seed)
        await session.chat(max_new_tokens=length, ignore_eos=True)
        return Outcome({"length": length / self.lengths.p99})
