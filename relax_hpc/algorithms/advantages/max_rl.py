"""The reward less the mean of its prompt group, by that mean."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import centred, means
from relax_hpc.errors import ConfigError


class MaxRl(Advantage):
    """A = (R - mean(R)) / mean(R) over the siblings of a prompt; 0 where nobody has a reward.

    For rewards of 0 and 1 it raises the logarithm of the chance to be right, so that rare successes
    weigh more. Source: MaxRL (arXiv:2602.02710). The authors, SkyRL and prime-rl agree but for an
    epsilon of 1e-6 in the denominator. A reward below 0 has no such meaning, and is refused.
    """

    name: Literal["max_rl"] = "max_rl"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        if (rows.rewards < 0).any():
            raise ConfigError(
                f"algorithm.advantage.name = 'max_rl': there is a reward of "
                f"{np.nanmin(rows.rewards):g}; use rewards of at least 0, or another advantage"
            )
        mean = means(rows.rewards)
        worth = centred(rows.rewards) / np.where(mean > 0, mean, 1)
        return np.asarray(worth, rows.rewards.dtype)
