"""Passes over the micro-batches of a batch, and applies the updates; names samples not finite."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from relax_hpc.algorithms import ratios
from relax_hpc.runtime.comm.torch_group import all_gather_json
from relax_hpc.trainer.megatron import adam, grid, schedule
from relax_hpc.trainer.megatron.costs import Costs
from relax_hpc.trainer.megatron.encoder import Encoder
from relax_hpc.trainer.megatron.features import Features
from relax_hpc.trainer.megatron.layers.router import take_metrics
from relax_hpc.trainer.megatron.metrics import StepSums, add_gap, settle_gap
from relax_hpc.trainer.megatron.packing import MicroBatch, MicroBatchWork
from relax_hpc.trainer.training_engine import NonFiniteSample, SkippedUpdate

_NAMED = 8


class _Found(NamedTuple):
    """The samples of one data-parallel rank that are not finite."""

    named: list[NonFiniteSample]
    num_samples: int
    without_logprobs: int
    """Samples among `num_samples` whose logprobs are not finite."""
    trained: int
    """Samples with a token to train on, finite or not."""


def explain(works: Sequence[MicroBatchWork], reason: str, in_a_row: int) -> SkippedUpdate:
    """Checks all works for values that are not finite. Collective over all ranks.

    Samples without finite logprobs come first: others may only suffer from a batch's mean.
    """
    samples = list(_samples(works)) if grid.is_last_stage() else []
    samples.sort(key=lambda sample: sample.what != "logprobs")
    group = mpu.get_data_parallel_group()
    mine = _Found(
        samples[:_NAMED],
        len(samples),
        sum(sample.what == "logprobs" for sample in samples),
        sum(bool(sample.loss_mask[1:].any()) for work in works for sample in work.samples),
    )
    ranks = [
        _Found([NonFiniteSample(*sample) for sample in named], *counts)
        for named, *counts in all_gather_json(mine, group)
    ]
    first_of_each = sorted(
        ((place, sample) for found in ranks for place, sample in enumerate(found.named)),
        key=lambda found: (found[1].what != "logprobs", found[0]),
    )
    named = tuple(sample for _, sample in islice(first_of_each, _NAMED))
    without = sum(found.without_logprobs for found in ranks)
    skip = SkippedUpdate(
        reason,
        named,
        sum(found.num_samples for found in ranks),
        in_a_row,
        is_model=without == sum(found.trained for found in ranks) > 0,
    )
    said = grid.from_last_stage(skip._asdict())
    return SkippedUpdate(
        **said | {"samples": tuple(NonFiniteSample(*sample) for sample in said["samples"])}
    )


def _samples(works: Sequence[MicroBatchWork]) -> Iterator[NonFiniteSample]:
    dp_rank = mpu.get_data_parallel_rank()
    for work in works:
        for document, what in _documents(work):
            sample = work.samples[document]
            yield NonFiniteSample(sample.guid, sample.sibling, dp_rank, work.number, what)


def _documents(work: MicroBatchWork) -> Iterator[tuple[int, str]]:
    lengths = work.micro_batch.lengths
    if _fault(work, torch.ones_like(work.micro_batch.loss_mask)) is None:
        return
    for document, end in enumerate(torch.tensor(lengths).cumsum(0).tolist()[: len(work.samples)]):
        alone = torch.zeros_like(work.micro_batch.loss_mask)
        alone[end - lengths[document] : end] = True
        if fault := _fault(work, alone):
            yield document, fault


def _fault(work: MicroBatchWork, inside: Tensor) -> str | None:
    """Returns what is not finite in the tokens [T] `inside`; ignores the others."""
    assert work.logprobs is not None
    given = work.micro_batch
    mask = given.loss_mask & inside
    cleared = {name: values.where(inside, 0) for name, values in given.columns.items()}
    logprobs = work.logprobs.where(inside, 0).requires_grad_()
    if not logprobs[mask].isfinite().all():
        return "logprobs"
    with torch.enable_grad():
        loss = work.objective.loss(logprobs, replace(given, loss_mask=mask, columns=cleared)).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
    if not loss.isfinite():
        return "loss"
    return None if gradient.isfinite().all() else "gradient"


Metrics = dict[str, float]


Logprobs = Callable[..., tuple[Tensor, Tensor]]
"""The last stage's head: (hidden states, micro-batch, *, entropy_gradient) -> [T] logprobs with
gradient, and [T] entropy."""


class Updates:
    """Sums gradients and applies them. Its methods are collective over all ranks."""

    skip: SkippedUpdate | None = None
    entropy_weight = 0.0

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        costs: Costs,
        logprobs: Logprobs,
        device: torch.device,
        encoder: Encoder | None = None,
    ) -> None:
        self._encoder = encoder
        self._chunks, self._wrapped, self._optimizer = chunks, wrapped, optimizer
        self._costs, self._logprobs, self._device = costs, logprobs, device
        self._skipped_in_a_row = 0
        self._begin()

    def look_ahead(self, works: Sequence[MicroBatchWork], version: int) -> Metrics:
        """Computes `old_logprobs` of the whole batch, and lets the objective prepare it.

        Args:
            works: of this rank, under the unchanged policy `version`.

        Returns:
            The gap to the sampler, see `metrics.add_gap`.
        """
        sums = StepSums()
        num_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        micro_batches = [work.micro_batch for work in works]
        features = self._encode(micro_batches, learns=False)
        with self._costs.phase("old_logprobs"):
            found = schedule.forward_on_last_stage(
                self._wrapped,
                micro_batches,
                lambda hidden, micro_batch: self._logprobs(hidden, micro_batch)[0],
                features,
            )
            for work, logprobs in zip(works, found, strict=False):  # none on the other stages
                _note_old(work, logprobs, sums, version)
                work.logprobs = logprobs
                num_tokens += work.micro_batch.loss_mask.sum()
            if works and grid.is_last_stage():
                _prepare(works)
        self._costs.count(works, is_forward=True)
        count = int(adam.total(num_tokens))
        metrics = sums.over_ranks(count)
        settle_gap(metrics, count)
        return metrics

    def pass_over(
        self, works: Sequence[MicroBatchWork], *, last: bool, version: int | None = None
    ) -> None:
        """Adds the gradient of micro-batches.

        Args:
            version: of the policy, if still unchanged: its logprobs become `old_logprobs` of works
                that have none.
        """

        def sum_loss(hidden: Tensor, work: MicroBatchWork) -> Tensor:
            return self._sum_loss(hidden, work, version)

        features = self._encode([work.micro_batch for work in works], learns=True)
        with (
            self._costs.phase("forward_backward"),
            adam.portion(self._wrapped, last=last),
        ):
            schedule.backward(self._wrapped, works, sum_loss, features)
        if self._encoder is not None:
            with self._costs.phase("towers"):
                self._encoder.learn(features, self._wrapped[0])
        self._costs.count(works)

    def routing_gap(self, works: Sequence[MicroBatchWork]) -> Metrics:
        """Measures the gap to the sampler with and without routing replay.

        Args:
            works: passed over before; a few are enough, the same number on every rank.

        Returns:
            `routing/gap` and `routing/gap_without`, mean abs nats per trained token; empty if no
            rank replays.
        """
        own = [work.micro_batch for work in works]
        replays = torch.tensor(float(any(each.routes is not None for each in own)))
        if not adam.total(replays.to(self._device)):
            return {}
        with self._costs.phase("old_logprobs"):
            found = schedule.forward_on_last_stage(
                self._wrapped,
                [replace(each, routes=None) for each in own],
                lambda hidden, micro_batch: self._logprobs(hidden, micro_batch)[0],
                self._encode(own, learns=False),
            )
        sums, num_tokens = StepSums(), torch.zeros((), dtype=torch.int64, device=self._device)
        for each, without in zip(own, found, strict=False):  # none on the other stages
            if not each.rows:
                continue
            sampled, mask = each.columns["rollout_logprobs"], each.loss_mask
            for name, mine in (("gap", each.columns["old_logprobs"]), ("gap_without", without)):
                sums.add(f"routing/{name}", (mine - sampled).abs().where(mask, 0).sum())
            num_tokens += mask.sum()
        return sums.over_ranks(int(adam.total(num_tokens)))

    def apply(self, works: Sequence[MicroBatchWork]) -> Metrics:
        """Sums the gradient over ranks, divides it by their denominator and applies it.

        Without a token to train on, weights, moments and the count of updates stay unchanged.

        Returns:
            `loss`, the loss's metrics and `entropy` per trained token; `grad_norm`; `skipped`.
        """
        result, reason = (
            adam.UpdateResult(math.nan, done=False),
            "the loss is not finite",
        )
        with self._costs.phase("update"):
            gradients = self._over_ranks()
            num_tokens = int(adam.total(self._num_tokens))
            denominator = adam.total(self._denominator) or 1.0
            metrics = self._sums.over_ranks(num_tokens) | take_metrics(self._chunks, num_tokens)
            settle_gap(metrics, num_tokens)
            ratios.settle(metrics)
            metrics["loss"] *= max(num_tokens, 1) / denominator
            if num_tokens == 0:
                result = adam.UpdateResult(0.0, done=False)
            elif math.isfinite(metrics["loss"]):
                result = adam.update(self._optimizer, gradients, 1 / denominator)
                reason = "the gradient is not finite"
        if result.done:
            self._skipped_in_a_row = 0
        elif num_tokens and not result.has_overflowed:
            self._skipped_in_a_row += 1
            self.skip = explain(works, reason, self._skipped_in_a_row)
        if scale := adam.loss_scale(self._optimizer):
            metrics["loss_scale"] = scale
        self._begin()
        return metrics | {"grad_norm": result.norm, "skipped": float(not result.done)}

    def forget(self) -> None:
        """Sums the gradient over ranks as `apply` does, and drops it."""
        self._over_ranks()
        take_metrics(self._chunks, 1)
        self._begin()

    def _over_ranks(self) -> adam.Gradients:
        adam.start_rest(self._wrapped)
        finalize_model_grads(self._wrapped)
        return adam.gradients(self._optimizer)

    def _encode(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> Features | None:
        if self._encoder is None:
            return None
        with self._costs.phase("towers"):
            return self._encoder.encode(micro_batches, learns=learns)

    def _begin(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._denominator = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sums = StepSums()
        self._sums.add("loss", torch.zeros((), device=self._device))  # there may be no trajectories

    def _sum_loss(self, hidden: Tensor, work: MicroBatchWork, version: int | None) -> Tensor:
        """Returns the [] loss of a micro-batch, on the last stage; notes its metrics."""
        weight = self.entropy_weight
        logprobs, entropy = self._logprobs(hidden, work.micro_batch, entropy_gradient=weight != 0)
        if work.logprobs is None and version is not None:  # the policy before the updates
            _note_old(work, logprobs.detach(), self._sums, version)
        work.logprobs = logprobs.detach()
        tokens, mask = work.micro_batch, work.micro_batch.loss_mask
        if weight:
            weights = torch.full_like(entropy, weight, requires_grad=False)
            tokens = tokens.with_columns(entropy=entropy, entropy_weight=weights)
        output = work.objective.loss(logprobs, tokens)
        self._num_tokens += (num_tokens := mask.sum())
        self._denominator += num_tokens if output.denominator is None else output.denominator
        self._sums.add("loss", output.loss.detach())
        self._sums.add("entropy", entropy.detach().where(mask, 0).sum())
        for name, value in output.metrics.items():
            self._sums.add(name, value.detach())
        return output.loss


def _note_old(work: MicroBatchWork, logprobs: Tensor, sums: StepSums, version: int) -> None:
    work.micro_batch = work.micro_batch.with_columns(old_logprobs=logprobs)
    add_gap(sums, work.micro_batch, version)


@torch.no_grad()
def _prepare(works: Sequence[MicroBatchWork]) -> None:
    prepare = works[0].objective.prepare
    if prepare is None:
        return
    found = prepare([work.micro_batch for work in works], _total)
    for work, tokens in zip(works, found, strict=True):
        work.micro_batch = work.micro_batch.with_columns(**tokens.columns)


def _total(value: Tensor) -> Tensor:
    """Returns the sum over data-parallel ranks; context-parallel ones have the same."""
    value = value.clone()
    dist.all_reduce(value, group=mpu.get_data_parallel_group())
    return value
