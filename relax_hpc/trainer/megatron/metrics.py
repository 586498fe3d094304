"""Sums a step's metrics on the device, and measures the gap between engine and trainer logprobs.

The gap covers tokens that the current policy sampled, so a difference is rounding, or one of the
two computes another model. With d = trainer - engine, in nats: mean and largest abs(d), and k3, the
mean of exp(d) - 1 - d, which estimates KL(engine || trainer)
(http://joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.runtime.comm.torch_group import all_gather_json
from relax_hpc.trainer.megatron import grid
from relax_hpc.trainer.megatron.packing import MicroBatch, MicroBatchWork
from relax_hpc.trainer.training_engine import LogprobGap, Worst


class StepSums:
    """Sums on the last pipeline stage; context-parallel ranks all hold the same."""

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
        """Returns means over `num_tokens`, or maxima, of all data-parallel ranks; collective.

        A rank without trajectories has, and needs, no sums.
        """
        names = list(self._values)
        values = torch.stack([v.float() for v in self._values.values()]).tolist() if names else []
        group = mpu.get_data_parallel_group()
        mine = {
            name: (value, name in self._largest) for name, value in zip(names, values, strict=True)
        }
        merged = _merge(all_gather_json(mine, group), num_tokens)
        return dict(grid.from_last_stage(merged))


def _merge(ranks: list[dict[str, tuple[float, bool]]], num_tokens: int) -> dict[str, float]:
    merged = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        present = [rank[name] for rank in ranks if name in rank]
        values = [value for value, _ in present]
        is_largest = present[0][1]
        merged[name] = max(values) if is_largest else math.fsum(values) / max(num_tokens, 1)
    return merged


_NAME = "engine_gap"


class _GapSums(NamedTuple):
    """The gap in one micro-batch; sums over its tokens."""

    num_tokens: int
    total: float
    k3: float
    worst: Worst

    @property
    def max(self) -> float:
        return abs(self.worst.trainer - self.worst.engine)


def add_gap(sums: StepSums, micro_batch: MicroBatch, policy_version: int) -> None:
    """Adds a micro-batch with `old_logprobs` to the metrics of the step, without waiting for the
    device.

    Rows that nobody sampled add nothing.
    """
    if not micro_batch.rows or "rollout_logprobs" not in micro_batch.columns:
        return
    gap = _gap(micro_batch).abs().where(micro_batch.loss_mask, 0)
    sums.add("logprob_gap/mean", gap.sum())
    sums.maximum("logprob_gap/max", gap.max())
    d, counts = _difference(micro_batch, policy_version)
    sums.add(f"{_NAME}/tokens", counts.sum())
    sums.add(f"{_NAME}/mean", d.abs().sum())
    sums.add(f"{_NAME}/k3", _k3(d).sum())
    sums.maximum(f"{_NAME}/max", d.abs().max())


def settle_gap(metrics: MutableMapping[str, float], num_tokens: int) -> None:
    """Rescales means over the batch's `num_tokens` to means over counted tokens.

    Removes the metrics if none counts.
    """
    share = metrics.pop(f"{_NAME}/tokens", 0.0)
    for name in ("mean", "k3"):
        mean = metrics.pop(f"{_NAME}/{name}", math.nan)
        if share:
            metrics[f"{_NAME}/{name}"] = mean / share
    if share:
        metrics[f"{_NAME}/tokens"] = round(share * num_tokens)
    else:
        metrics.pop(f"{_NAME}/max", None)


def measure_gap(works: Sequence[MicroBatchWork], policy_version: int) -> LogprobGap | None:
    """Measures the gap over all works; collective, the same on every rank.

    Returns:
        None if no trained token was sampled by `policy_version`.
    """
    mine = list(_parts(works, policy_version)) if grid.is_last_stage() else []
    group = mpu.get_data_parallel_group()
    parts = [
        _GapSums(tokens, total, k3, Worst(*worst))
        for rank in all_gather_json(mine, group)
        for tokens, total, k3, worst in rank
    ]
    gap = _merge_gaps(parts)
    said = grid.from_last_stage(gap and gap._asdict())
    return said and LogprobGap(**said | {"worst": Worst(*said["worst"])})


def _merge_gaps(parts: Sequence[_GapSums]) -> LogprobGap | None:
    if not parts:
        return None
    count = sum(part.num_tokens for part in parts)
    # One that is not a number is the worst.
    worst = max(parts, key=lambda part: math.inf if math.isnan(part.max) else part.max)
    return LogprobGap(
        count,
        sum(part.total for part in parts) / count,
        worst.max,
        sum(part.k3 for part in parts) / count,
        worst.worst,
    )


def _parts(works: Sequence[MicroBatchWork], policy_version: int) -> Iterator[_GapSums]:
    for work in works:
        d, counts = _difference(work.micro_batch, policy_version)
        if num_tokens := int(counts.sum()):
            d = d.double()
            at = int(d.abs().where(counts, -1).argmax())
            yield _GapSums(num_tokens, float(d.abs().sum()), float(_k3(d).sum()), _token(work, at))


def _token(work: MicroBatchWork, at: int) -> Worst:
    given = work.micro_batch
    ends = torch.tensor(given.lengths).cumsum(0)
    document = int(torch.searchsorted(ends, at, right=True))
    sample = work.samples[document]
    return Worst(
        sample.guid,
        sample.sibling,
        at - int(ends[document]) + given.lengths[document],
        float(given.columns["rollout_logprobs"][at]),
        float(given.columns["old_logprobs"][at]),
    )


def _difference(micro_batch: MicroBatch, policy_version: int) -> tuple[Tensor, Tensor]:
    """Returns [T] d, 0 for tokens that do not count, and [T] whether they count."""
    counts = micro_batch.loss_mask & (micro_batch.policy_versions == policy_version)
    return _gap(micro_batch).where(counts, 0), counts


def _gap(micro_batch: MicroBatch) -> Tensor:
    return micro_batch.columns["old_logprobs"] - micro_batch.columns["rollout_logprobs"]


def _k3(d: Tensor) -> Tensor:
    return d.expm1() - d
