"""The reward minus its group's mean, divided by that mean."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center, means
from relax_hpc.errors import ConfigError


class MaxRl(Advantage):
    """A = (R - mean(R)) / mean(R) over the siblings of a prompt; 0 if all rewards are 0.

    For rewards of 0 and 1 it maximises the log probability of being right, so that rare successes
    weigh more. Rewards below 0 have no such meaning, and are refused. Source: MaxRL
    (arXiv:2602.02710). The authors, SkyRL and prime-rl agree but for an epsilon of 1e-6 in the
    denominator.
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
        worth = center(rows.rewards) / np.where(mean > 0, mean, 1)
        return np.asarray(worth, rows.rewards.dtype)
