"""The actor's model: trains on trajectories, and gives its weights away under their HF names."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from relax_hpc.comm.world import World
from relax_hpc.config import RunConfig
from relax_hpc.engines.megatron import (
    attention,
    checkpoint,
    cpu,
    hf_names,
    layers,
    model,
    optimizer,
    packing,
)
from relax_hpc.engines.megatron.attention import PackedRows
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.errors import ConfigError
from relax_hpc.schema import Trajectory


class LossOutput(Protocol):
    """What a loss returns; read only."""

    @property
    def loss(self) -> Tensor:
        """[] summed over tokens: micro-batches, portions and ranks add up."""
        ...

    @property
    def metrics(self) -> dict[str, Tensor]:
        """[] each, summed likewise."""
        ...


Loss = Callable[[Tensor, MicroBatch], LossOutput]
"""([T] logprobs with gradient, micro-batch with `old_logprobs`) -> loss."""

_GAP_MAX = "logprob_gap/max"


class MegatronTrainer:
    """One rank of the actor. All its public methods but the properties are collective.

    Ranks of a tensor-parallel group are given the same trajectories, data-parallel ranks a
    partition of the batch.
    """

    step: int
    """Batches trained on; also the policy version of the weights."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        device: torch.device,
        *,
        random_weights: bool = False,
    ) -> None:
        """Builds the model and loads model.path.

        Needs torch.distributed initialised with the ranks of `world`.

        Args:
            random_weights: do not load them; of model.path only config.json is read.

        Raises:
            ConfigError: the layout does not fit the ranks or the model; a field of
                actor.transformer is unknown; the model is not a dense Qwen3.
        """
        if world.size != config.actor.world_size:
            raise ConfigError(
                f"actor.tensor_parallel x data_parallel = {config.actor.world_size}: "
                f"but there are {world.size} ranks; they must agree"
            )
        cpu.install()
        shape = model.read_architecture(config.model.path)
        transformer = model.transformer_config(config, shape)
        if not mpu.model_parallel_is_initialized():
            mpu.initialize_model_parallel(config.actor.tensor_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
        self.step = 0
        self._config = config
        self._device = device
        attend = attention.choose(config.actor.attention, device, transformer.params_dtype)
        self._model = model.build(transformer, shape, device, attend)
        layers.set_recomputed(self._model, config.actor.recomputed_passes)
        if not random_weights:
            hf_names.load(self._model, config.model.path)
        self._ddp, self._optimizer = optimizer.build(config.actor.optimizer, self._model)
        self._kept: list[tuple[MicroBatch, Loss]] = []
        self._begin_pass()

    @property
    def dp_rank(self) -> int:
        return int(mpu.get_data_parallel_rank())

    @property
    def dp_size(self) -> int:
        return int(mpu.get_data_parallel_world_size())

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        micro_batches: Sequence[Sequence[int]],
        advantages: npt.NDArray[np.floating],
        loss: Loss,
    ) -> None:
        """Adds a part of the batch of step `step` + 1 to the gradient.

        Gradients add up: the result does not depend on the split into parts, micro-batches and
        ranks. An empty micro-batch computes with the others and adds nothing.

        Args:
            trajectories: this data-parallel rank's; may be none.
            micro_batches: indices into `trajectories`; on every rank equally many.
            advantages: [len(trajectories)].
        """
        for rows in micro_batches:
            self._backward(self._build(trajectories, advantages, rows), loss)

    def update(self) -> dict[str, float]:
        """Turns policy `step` into policy `step` + 1 by what was accumulated.

        The gradient is that of the loss's mean over the trained tokens of the whole batch, on all
        ranks. With `epochs_per_step` > 1 the batch is passed over again, an update each time.

        Returns:
            The loss's metrics per trained token, `loss`, `entropy` [nats], `grad_norm` before
            clipping, and `skipped` updates, as the epochs' mean, the same on every rank; `lr`;
            `logprob_gap/mean` and `/max` [nats] between this policy and the sampler, before the
            updates. An update is skipped when its loss or gradient is not finite.
        """
        config = self._config
        self.step += 1
        rate = optimizer.learning_rate(
            config.actor.optimizer, self.step, config.algorithm.num_steps
        )
        optimizer.set_learning_rate(self._optimizer, rate)
        kept, epochs = self._kept, [self._end_pass()]
        for _ in range(config.algorithm.epochs_per_step - 1):
            for micro_batch, loss in kept:
                self._backward(micro_batch, loss)
            epochs.append(self._end_pass())
        self._kept = []
        means = {
            key: float(np.mean([epoch[key] for epoch in epochs if key in epoch]))
            for key in epochs[0]
        }
        return means | {"lr": rate}

    def forward_logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """Logprobs of the trajectories' tokens under the current weights.

        Args:
            micro_batches: as for `accumulate`; every trajectory is in one.

        Returns:
            Per trajectory [tokens] nats, 0 for its first token.
        """
        logprobs: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        for rows in micro_batches:
            micro_batch = self._build(trajectories, np.zeros(len(trajectories)), rows)
            with torch.no_grad():
                packed, _ = self._forward(micro_batch)
            documents = torch.split(packed.cpu(), list(micro_batch.lengths))
            for row, document in zip(micro_batch.rows, documents, strict=False):  # last: padding
                logprobs[row] = document.numpy()
        return logprobs

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names; every rank must iterate to the end."""
        return hf_names.named_weights(self._model)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint into `folder`, made if it is not there; it must be empty.

        Not atomic: save to a folder of another name, then rename it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        checkpoint.save(folder, self._trainee, self.step)

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; bitwise, if the parallel layout is the same."""
        self.step = checkpoint.load(folder, self._trainee)

    @property
    def _trainee(self) -> checkpoint.Trainee:
        return checkpoint.Trainee(self._model, self._optimizer)

    def _build(
        self,
        trajectories: Sequence[Trajectory],
        advantages: npt.NDArray[np.floating],
        rows: Sequence[int],
    ) -> MicroBatch:
        transformer = self._model.config
        multiple_of = transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
        return packing.build(
            trajectories, advantages, rows, device=self._device, multiple_of=multiple_of
        )

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[T] logprobs of the tokens, with gradient, and [T] entropy where they were sampled."""
        hidden = self._ddp(
            micro_batch.token_ids[None],
            micro_batch.position_ids[None],
            None,
            packed_seq_params=PackedRows.of(micro_batch.lengths, self._device),
        )
        logprobs, entropy = self._model.logprobs(
            hidden,
            packing.next_tokens(micro_batch.token_ids),
            temperature=self._config.rollout.temperature,
            float32_logits=self._config.actor.float32_logits,
            kept_gib=self._config.actor.kept_logits_gib,
        )
        return (
            packing.at_predicted_token(logprobs, micro_batch.is_first),
            packing.at_predicted_token(entropy, micro_batch.is_first),
        )

    def _backward(self, micro_batch: MicroBatch, loss: Loss) -> None:
        logprobs, entropy = self._forward(micro_batch)
        mask = micro_batch.loss_mask
        if micro_batch.old_logprobs is None:  # first pass: this is the policy before the updates
            micro_batch = replace(micro_batch, old_logprobs=logprobs.detach())
            gap = (logprobs.detach() - micro_batch.rollout_logprobs).abs().where(mask, 0)
            self._sums.add("logprob_gap/mean", gap.sum())
            self._sums.maximum(_GAP_MAX, gap.max())
            if self._config.algorithm.epochs_per_step > 1:
                self._kept.append((micro_batch, loss))
        output = loss(logprobs, micro_batch)
        output.loss.backward()  # type: ignore[no-untyped-call]
        self._num_tokens += mask.sum()
        self._sums.add("loss", output.loss.detach())
        self._sums.add("entropy", entropy.where(mask, 0).sum())
        for name, value in output.metrics.items():
            self._sums.add(name, value.detach())

    def _begin_pass(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._sums = _Sums()
        self._sums.add("loss", torch.zeros((), device=self._device))  # there may be no trajectories

    def _end_pass(self) -> dict[str, float]:
        """Sums the gradient over ranks, divides it by their tokens and applies it."""
        finalize_model_grads([self._ddp])
        num_tokens = optimizer.total_tokens(self._num_tokens)
        metrics = self._sums.over(mpu.get_data_parallel_group(), num_tokens=num_tokens)
        norm, updated = math.nan, False
        if math.isfinite(metrics["loss"]):
            norm, updated = optimizer.update(self._optimizer, 1 / max(num_tokens, 1))
        self._begin_pass()
        return metrics | {"grad_norm": norm, "skipped": float(not updated)}


class _Sums:
    """Metrics on the device until one transfer at the end."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        self._values[name] = self._values[name] + value if name in self._values else value

    def maximum(self, name: str, value: Tensor) -> None:
        known = self._values.get(name)
        self._values[name] = value if known is None else torch.maximum(known, value)

    def over(self, group: dist.ProcessGroup, *, num_tokens: int) -> dict[str, float]:
        """Means over the tokens of all ranks; one without trajectories has, and needs, no sums."""
        names = list(self._values)
        values = torch.stack([v.float() for v in self._values.values()]).tolist() if names else []
        ranks: list[dict[str, float]] = [{} for _ in range(group.size())]
        dist.all_gather_object(ranks, dict(zip(names, values, strict=True)), group=group)
        merged = dict.fromkeys([name for rank in ranks for name in rank], 0.0)
        for name in merged:
            present = [rank[name] for rank in ranks if name in rank]
            total = math.fsum(present) / max(num_tokens, 1)
            merged[name] = max(present) if name == _GAP_MAX else total
        return merged
