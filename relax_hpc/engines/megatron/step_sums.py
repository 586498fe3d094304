"""Metrics of a step: summed on the device, averaged over the tokens of all ranks at its end."""

import math

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.engines.megatron import grid


class StepSums:
    """Kept on the last pipeline stage; context-parallel ranks all hold the same."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._largest: set[str] = set()

    def add(self, name: str, value: Tensor) -> None:
        self._values[name] = self._values[name] + value if name in self._values else value

    def maximum(self, name: str, value: Tensor) -> None:
        known = self._values.get(name)
        self._values[name] = value if known is None else torch.maximum(known, value)
        self._largest.add(name)

    def over_ranks(self, num_tokens: int) -> dict[str, float]:
        """Means over `num_tokens`, or maxima, of all data-parallel ranks; collective.

        A rank without trajectories has, and needs, no sums.
        """
        names = list(self._values)
        values = torch.stack([v.float() for v in self._values.values()]).tolist() if names else []
        group = mpu.get_data_parallel_group()
        mine = {
            name: (value, name in self._largest) for name, value in zip(names, values, strict=True)
        }
        merged = _merged(all_gather_json(mine, group), num_tokens)
        return dict(grid.from_last_stage(merged))


def _merged(ranks: list[dict[str, tuple[float, bool]]], num_tokens: int) -> dict[str, float]:
    merged = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        present = [rank[name] for rank in ranks if name in rank]
        values = [value for value, _ in present]
        is_largest = present[0][1]
        merged[name] = max(values) if is_largest else math.fsum(values) / max(num_tokens, 1)
    return merged
