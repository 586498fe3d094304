"""Passes over the micro-batches of a batch, and the updates that they end in."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from relax_hpc.algorithms import ratios
from relax_hpc.engines.megatron import engine_gap, grid, nonfinite, schedule
from relax_hpc.engines.megatron.costs import Costs
from relax_hpc.engines.megatron.moe.router import take_metrics
from relax_hpc.engines.megatron.optimizer import distributed_adam, grad_sync
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.step_sums import StepSums
from relax_hpc.engines.megatron.vision.encoder import Encoder
from relax_hpc.engines.megatron.vision.features import Features
from relax_hpc.engines.megatron.work import Work
from relax_hpc.engines.training_engine import Skip

Metrics = dict[str, float]


class Logprobs(Protocol):
    """The last stage's own work on its hidden states."""

    def __call__(
        self, hidden: Tensor, micro_batch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """[T] logprobs with gradient, and [T] entropy."""
        ...


class Updates:
    """Adds gradients up and applies them. Its methods are collective over all ranks."""

    skip: Skip | None = None
    """Reason why the last update was not done, if it was not."""
    entropy_weight = 0.0
    """Weight of the entropy in the loss."""

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

    def look_ahead(self, works: Sequence[Work], version: int) -> Metrics:
        """Computes `old_logprobs` of the whole batch, and lets the objective prepare it.

        Args:
            works: this rank's, of policy `version` still.

        Returns:
            The gap to the sampler, see `engine_gap`.
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
        count = int(distributed_adam.total(num_tokens))
        metrics = sums.over_ranks(count)
        engine_gap.settle(metrics, count)
        return metrics

    def pass_over(self, works: Sequence[Work], *, last: bool, version: int | None = None) -> None:
        """Adds the gradient of micro-batches.

        Args:
            last: nothing follows before `apply`.
            version: the policy is this one still, so that what it computes are `old_logprobs` of
                those that have none.
        """

        def sum_loss(hidden: Tensor, work: Work) -> Tensor:
            return self._sum_loss(hidden, work, version)

        features = self._encode([work.micro_batch for work in works], learns=True)
        with self._costs.phase("forward_backward"), grad_sync.portion(self._wrapped, last=last):
            schedule.backward(self._wrapped, works, sum_loss, features)
        if self._encoder is not None:
            with self._costs.phase("towers"):
                self._encoder.learn(features, self._wrapped[0])
        self._costs.count(works)

    def routing_gap(self, works: Sequence[Work]) -> Metrics:
        """Measures the gap to the sampler with and without routing replay.

        Args:
            works: that were passed over; a few are enough, the same number on every rank.

        Returns:
            `routing/gap` and `routing/gap_without`, mean abs nats per trained token; nothing where
            no rank replays.
        """
        own = [work.micro_batch for work in works]
        replays = torch.tensor(float(any(each.routes is not None for each in own)))
        if not distributed_adam.total(replays.to(self._device)):
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
        return sums.over_ranks(int(distributed_adam.total(num_tokens)))

    def apply(self, works: Sequence[Work]) -> Metrics:
        """Sums the gradient over ranks, divides it by their denominator and applies it.

        Without a token to train on there is no gradient, and weights, moments and the count of
        updates stay what they are.

        Args:
            works: all that was passed over; the one to blame is among them.

        Returns:
            `loss`, the loss's metrics and `entropy` per trained token; `grad_norm`; `skipped`.
        """
        result, reason = distributed_adam.Update(math.nan, done=False), "the loss is not finite"
        with self._costs.phase("update"):
            gradients = self._over_ranks()
            num_tokens = int(distributed_adam.total(self._num_tokens))
            denominator = distributed_adam.total(self._denominator) or 1.0
            metrics = self._sums.over_ranks(num_tokens) | take_metrics(self._chunks, num_tokens)
            engine_gap.settle(metrics, num_tokens)
            ratios.settle(metrics)
            metrics["loss"] *= max(num_tokens, 1) / denominator
            if num_tokens == 0:
                result = distributed_adam.Update(0.0, done=False)
            elif math.isfinite(metrics["loss"]):
                result = distributed_adam.update(self._optimizer, gradients, 1 / denominator)
                reason = "the gradient is not finite"
        if result.done:
            self._skipped_in_a_row = 0
        elif num_tokens and not result.has_overflowed:
            self._skipped_in_a_row += 1
            self.skip = nonfinite.explain(works, reason, self._skipped_in_a_row)
        if scale := distributed_adam.loss_scale(self._optimizer):
            metrics["loss_scale"] = scale
        self._begin()
        return metrics | {"grad_norm": result.norm, "skipped": float(not result.done)}

    def forget(self) -> None:
        """Sums the gradient over ranks as `apply` does, and drops it with what was passed over."""
        self._over_ranks()
        take_metrics(self._chunks, 1)
        self._begin()

    def _over_ranks(self) -> distributed_adam.Gradients:
        grad_sync.start_rest(self._wrapped)
        finalize_model_grads(self._wrapped)
        return distributed_adam.gradients(self._optimizer)

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

    def _sum_loss(self, hidden: Tensor, work: Work, version: int | None) -> Tensor:
        """[] loss of a micro-batch, on the last stage; its metrics are noted."""
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


def _note_old(work: Work, logprobs: Tensor, sums: StepSums, version: int) -> None:
    work.micro_batch = work.micro_batch.with_columns(old_logprobs=logprobs)
    engine_gap.add(sums, work.micro_batch, version)


@torch.no_grad()
def _prepare(works: Sequence[Work]) -> None:
    """Lets the objective look at all micro-batches of this rank."""
    prepare = works[0].objective.prepare
    if prepare is None:
        return
    found = prepare([work.micro_batch for work in works], _total)
    for work, tokens in zip(works, found, strict=True):
        work.micro_batch = work.micro_batch.with_columns(**tokens.columns)


def _total(value: Tensor) -> Tensor:
    """The sum over data-parallel ranks; context-parallel ones have the same."""
    value = value.clone()
    dist.all_reduce(value, group=mpu.get_data_parallel_group())
    return value
