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
from relax_hpc.engines.megatron import checkpoint, cpu, hf_names, model, optimizer, packing
from relax_hpc.engines.megatron.layers import PackedRows
from relax_hpc.engines.megatron.logprobs import token_logprobs
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.errors import ConfigError
from relax_hpc.schema import Trajectory


class LossOutput(Protocol):
    """What a loss returns; read only."""

    @property
    def loss(self) -> Tensor:
        """[] already divided by the global batch's tokens: micro-batches and ranks add up."""
        ...

    @property
    def metrics(self) -> dict[str, Tensor]:
        """[] each, to be summed over micro-batches and ranks."""
        ...


Loss = Callable[[Tensor, MicroBatch], LossOutput]
"""([T] logprobs with gradient, micro-batch with `old_logprobs`) -> loss."""

_GAP_MAX = "logprob_gap/max"


class MegatronTrainer:
    """One rank of the actor. All its public methods but the properties are collective.

    Ranks of a tensor-parallel group are given the same trajectories, data-parallel ranks a
    partition of the batch, see `packing.split_over_ranks`.
    """

    step: int
    """Batches trained on; also the policy version of the weights."""

    def __init__(self, config: RunConfig, world: World, device: torch.device) -> None:
        """Builds the model and loads model.path.

        Needs torch.distributed initialised with the ranks of `world`.

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
        self._model = model.build(transformer, shape, device)
        hf_names.load(self._model, config.model.path)
        self._ddp, self._optimizer = optimizer.build(config.actor.optimizer, self._model)

    @property
    def dp_rank(self) -> int:
        return int(mpu.get_data_parallel_rank())

    @property
    def dp_size(self) -> int:
        return int(mpu.get_data_parallel_world_size())

    @property
    def tp_rank(self) -> int:
        return int(mpu.get_tensor_model_parallel_rank())

    def split(self, lengths: Sequence[int]) -> list[int]:
        """Which of the rows, given their tokens, this data-parallel rank trains on."""
        return packing.split_over_ranks(lengths, self.dp_size)[self.dp_rank]

    def train_step(
        self,
        trajectories: Sequence[Trajectory],
        advantages: npt.NDArray[np.floating],
        *,
        num_tokens: int,
        loss: Loss,
    ) -> dict[str, float]:
        """Turns policy `step` into policy `step` + 1: one update per epoch over the batch.

        Gradients add up: the result does not depend on the split into micro-batches and ranks.

        Args:
            trajectories: this data-parallel rank's part of the batch; may be empty.
            advantages: [len(trajectories)].
            num_tokens: trained tokens of the whole batch, all ranks.

        Returns:
            The loss's metrics, `loss`, `entropy` [nats per token], `grad_norm` before clipping,
            and `skipped` updates, as the epochs' mean, the same on every rank; `lr`;
            `logprob_gap/mean` and `/max` [nats] between this policy and the sampler, before the
            updates. An update is skipped when its loss or gradient is not finite.
        """
        config = self._config
        self.step += 1
        rate = optimizer.learning_rate(
            config.actor.optimizer, self.step, config.algorithm.num_steps
        )
        optimizer.set_learning_rate(self._optimizer, rate)
        micro_batches = self._pack(trajectories, advantages)
        epochs = []
        for _ in range(config.algorithm.epochs_per_step):
            micro_batches, metrics = self._accumulate(micro_batches, num_tokens, loss)
            norm, updated = math.nan, False
            if math.isfinite(metrics["loss"]):
                norm, updated = optimizer.update(self._optimizer)
            epochs.append(metrics | {"grad_norm": norm, "skipped": float(not updated)})
        means = {
            key: float(np.mean([epoch[key] for epoch in epochs if key in epoch]))
            for key in epochs[0]
        }
        return means | {"lr": rate}

    def forward_logprobs(self, trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        """Logprobs of the trajectories' tokens under the current weights.

        Returns:
            Per trajectory [tokens] nats, 0 for its first token.
        """
        logprobs: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        for micro_batch in self._pack(trajectories, np.zeros(len(trajectories))):
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

    def _pack(
        self, trajectories: Sequence[Trajectory], advantages: npt.NDArray[np.floating]
    ) -> list[MicroBatch]:
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        transformer = self._model.config
        multiple_of = transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
        return [
            packing.build(
                trajectories, advantages, rows, device=self._device, multiple_of=multiple_of
            )
            for rows in packing.pack(lengths, self._config.actor.tokens_per_micro_batch)
        ]

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[T] logprobs of the tokens, with gradient, and [T] entropy where they were sampled."""
        logits = self._ddp(
            micro_batch.token_ids[None],
            micro_batch.position_ids[None],
            None,
            packed_seq_params=PackedRows.of(micro_batch.lengths, micro_batch.cu_seqlens),
        )
        logprobs, entropy = token_logprobs(
            logits[0],
            packing.next_tokens(micro_batch.token_ids),
            temperature=self._config.rollout.temperature,
            group=mpu.get_tensor_model_parallel_group(),
        )
        return (
            packing.at_predicted_token(logprobs, micro_batch.is_first),
            packing.at_predicted_token(entropy, micro_batch.is_first),
        )

    def _accumulate(
        self, micro_batches: list[MicroBatch], num_tokens: int, loss: Loss
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Leaves the whole batch's gradient in the optimizer; returns old logprobs and metrics."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = _Sums()
        sums.add("loss", torch.zeros((), device=self._device))  # there may be no trajectories
        seen = []
        for micro_batch in micro_batches:
            logprobs, entropy = self._forward(micro_batch)
            mask = micro_batch.loss_mask
            if micro_batch.old_logprobs is None:
                micro_batch = replace(micro_batch, old_logprobs=logprobs.detach())
                gap = (logprobs.detach() - micro_batch.rollout_logprobs).abs().where(mask, 0)
                sums.add("logprob_gap/mean", gap.sum() / num_tokens)
                sums.maximum(_GAP_MAX, gap.max())
            output = loss(logprobs, micro_batch)
            output.loss.backward()  # type: ignore[no-untyped-call]
            sums.add("loss", output.loss.detach())
            sums.add("entropy", entropy.where(mask, 0).sum() / num_tokens)
            for name, value in output.metrics.items():
                sums.add(name, value.detach())
            seen.append(micro_batch)
        finalize_model_grads([self._ddp])
        return seen, sums.over(mpu.get_data_parallel_group())


class _Sums:
    """Metrics on the device until one transfer at the end."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        self._values[name] = self._values[name] + value if name in self._values else value

    def maximum(self, name: str, value: Tensor) -> None:
        known = self._values.get(name)
        self._values[name] = value if known is None else torch.maximum(known, value)

    def over(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Combines ranks; a rank that had no trajectories has no metrics, and needs none."""
        names = list(self._values)
        values = torch.stack([v.float() for v in self._values.values()]).tolist() if names else []
        ranks: list[dict[str, float]] = [{} for _ in range(group.size())]
        dist.all_gather_object(ranks, dict(zip(names, values, strict=True)), group=group)
        merged = dict.fromkeys([name for rank in ranks for name in rank], 0.0)
        for name in merged:
            present = [rank[name] for rank in ranks if name in rank]
            merged[name] = max(present) if name == _GAP_MAX else math.fsum(present)
        return merged
