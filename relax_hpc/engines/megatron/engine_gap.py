"""The gap between engines' logprobs and the trainer's, of tokens that this very policy sampled.

The same policy gave both, so what is between them is rounding, or one of the two computes another
model. With d = trainer - engine, in nats: mean and largest abs(d), and k3, the mean of
exp(d) - 1 - d, which estimates KL(engine || trainer) (http://joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.step_sums import StepSums
from relax_hpc.engines.megatron.work import Work
from relax_hpc.engines.training_engine import Gap, Worst

_NAME = "engine_gap"


class _Part(NamedTuple):
    """The gap in one micro-batch; sums over its tokens."""

    num_tokens: int
    total: float
    k3: float
    worst: Worst

    @property
    def max(self) -> float:
        return abs(self.worst.trainer - self.worst.engine)


def add(sums: StepSums, micro_batch: MicroBatch, policy_version: int) -> None:
    """Adds a micro-batch with `old_logprobs` to the metrics of the step; nothing is waited for.

    Of rows that nobody sampled there is nothing to add.
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


def settle(metrics: MutableMapping[str, float], num_tokens: int) -> None:
    """Makes means over the tokens that count of those over the `num_tokens` of the batch.

    Where none counts, there are no metrics.
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


def measure(works: Sequence[Work], policy_version: int) -> Gap | None:
    """Measures the gap in all that was passed over; collective, the same on every rank.

    Returns:
        None if no trained token was sampled by `policy_version`.
    """
    mine = list(_parts(works, policy_version)) if grid.is_last_stage() else []
    group = mpu.get_data_parallel_group()
    parts = [
        _Part(tokens, total, k3, Worst(*worst))
        for rank in all_gather_json(mine, group)
        for tokens, total, k3, worst in rank
    ]
    gap = _merged(parts)
    said = grid.from_last_stage(gap and gap._asdict())
    return said and Gap(**said | {"worst": Worst(*said["worst"])})


def _merged(parts: Sequence[_Part]) -> Gap | None:
    if not parts:
        return None
    count = sum(part.num_tokens for part in parts)
    # One that is not a number is the worst.
    worst = max(parts, key=lambda part: math.inf if math.isnan(part.max) else part.max)
    return Gap(
        count,
        sum(part.total for part in parts) / count,
        worst.max,
        sum(part.k3 for part in parts) / count,
        worst.worst,
    )


def _parts(works: Sequence[Work], policy_version: int) -> Iterator[_Part]:
    for work in works:
        d, counts = _difference(work.micro_batch, policy_version)
        if num_tokens := int(counts.sum()):
            d = d.double()
            at = int(d.abs().where(counts, -1).argmax())
            yield _Part(num_tokens, float(d.abs().sum()), float(_k3(d).sum()), _token(work, at))


def _token(work: Work, at: int) -> Worst:
    """Token `at` of a micro-batch."""
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
    """[T] d, 0 where it does not count, and [T] where it does."""
    counts = micro_batch.loss_mask & (micro_batch.policy_versions == policy_version)
    return _gap(micro_batch).where(counts, 0), counts


def _gap(micro_batch: MicroBatch) -> Tensor:
    return micro_batch.columns["old_logprobs"] - micro_batch.columns["rollout_logprobs"]


def _k3(d: Tensor) -> Tensor:
    return d.expm1() - d
