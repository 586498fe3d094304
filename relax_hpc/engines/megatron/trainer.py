"""The actor's model: trains on trajectories, and gives its weights away under their HF names."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from relax_hpc.algorithms.composition import Objective
from relax_hpc.comm.world import World
from relax_hpc.config.layout import MegatronConfig
from relax_hpc.config.model import ModelConfig
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.engines.megatron import engine_gap, nonfinite, schedule
from relax_hpc.engines.megatron.checkpoint.host_copy import HostCopy
from relax_hpc.engines.megatron.checkpoint.part import CheckpointPart, Trainee, load_checkpoint
from relax_hpc.engines.megatron.checkpoint.read import damage
from relax_hpc.engines.megatron.costs import Costs
from relax_hpc.engines.megatron.hf import hf_weights
from relax_hpc.engines.megatron.moe.router import take_metrics
from relax_hpc.engines.megatron.optimizer import distributed_adam, grad_sync
from relax_hpc.engines.megatron.optimizer.learning_rate import learning_rate
from relax_hpc.engines.megatron.optimizer.weight_bank import WeightBank
from relax_hpc.engines.megatron.scorer import MegatronScorer
from relax_hpc.engines.megatron.step_sums import StepSums
from relax_hpc.engines.megatron.work import Work
from relax_hpc.engines.training_engine import Gap, Skip
from relax_hpc.errors import TrainingError
from relax_hpc.schema import Row


class MegatronTrainer(MegatronScorer):
    """One rank of the actor. All its public methods but the properties are collective.

    Ranks of a replica (tensor, pipeline and context parallel) are given the same trajectories,
    data-parallel ranks a partition of the batch.
    """

    step: int
    """Batches trained on; also the policy version of the weights."""

    def __init__(
        self,
        config: ModelConfig,
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        world: World,
        device: torch.device,
        *,
        num_steps: int,
        epochs_per_step: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        random_weights: bool = False,
    ) -> None:
        """Does as MegatronScorer, and makes gradient buffers and the optimizer.

        Args:
            num_steps: where the learning rate has fallen to its end.
            epochs_per_step: passes over a batch, each an update.
        """
        super().__init__(
            config, megatron, world, device,
            seed=seed, temperature=temperature, random_weights=random_weights,
        )  # fmt: skip
        self.step = 0
        self._num_steps, self._epochs_per_step = num_steps, epochs_per_step
        self._seed, self._rates = seed, optimizer
        self._wrapped, self._optimizer = distributed_adam.build(
            optimizer, self._chunks, config.dtype
        )
        self._run_chunks = self._wrapped
        self.bank = WeightBank(self._wrapped)
        """Further weights for this model, e.g. of a reference policy."""
        self.skip: Skip | None = None
        """Reason why the last update was not done, if it was not; the same on every rank."""
        self.costs: dict[str, float] = {}
        """Costs of the last step, see `costs.Costs.end_step`."""
        self._costs = Costs(self._shape, device)
        self._skipped_in_a_row = 0
        self._works: list[Work] = []
        """Works of this step; kept to be passed over again, and to name those that went wrong."""
        self._host_copy = HostCopy()
        self._begin_pass()

    def accumulate(
        self,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
        objective: Objective,
        *,
        last: bool = False,
    ) -> None:
        """Adds a part of the batch of step `step` + 1 to the gradient.

        Gradients add up: the result does not depend on the split into parts, micro-batches and
        ranks. An empty micro-batch computes with the others and adds nothing.

        Args:
            trajectories: this data-parallel rank's; may be none.
            micro_batches: indices into `trajectories`; on every rank equally many.
            last: nothing follows, so that the sum over ranks may begin on the way.
        """
        works = [
            Work(
                self._build(trajectories, rows),
                objective,
                [trajectories[row] for row in rows],
            )
            for rows in micro_batches
        ]
        self._pass_over(works, last=last)
        self._works += works

    def engine_gap(self) -> Gap | None:
        """Measures how far engines are from this policy in what was accumulated; before `update`.

        None if no trained token of it was sampled by policy `step`.
        """
        return engine_gap.measure(self._works, self.step)

    def update(self) -> dict[str, float]:
        """Turns policy `step` into policy `step` + 1 by what was accumulated.

        The gradient is that of the loss's sum over the whole batch, on all ranks, divided by its
        denominator: the trained tokens, unless the loss has another. With `epochs_per_step` > 1 the
        batch is passed over again, an update each time.

        Returns:
            `loss`, the loss's metrics per trained token, `entropy` [nats], `grad_norm` before
            clipping, and `skipped` updates, as the epochs' mean, the same on every rank; `lr`;
            `logprob_gap/mean` and `/max` [nats] between this policy and the sampler, before the
            updates; `engine_gap/...` likewise, of the tokens that this policy sampled, if there
            are some. An update is skipped when its loss or gradient is not finite.

        Raises:
            TrainingError: an update made the weights infinite or not a number; on every rank.
        """
        self.step += 1
        rate = learning_rate(self._rates, self.step, self._num_steps)
        distributed_adam.set_learning_rate(self._optimizer, rate)
        self.skip = None
        epochs = [self._end_pass()]
        for _ in range(self._epochs_per_step - 1):
            self._pass_over(self._works, last=True)
            epochs.append(self._end_pass())
        self._works = []
        self._check_weights(epochs, rate)
        self.costs = self._costs.end_step()
        means = {
            key: float(np.mean([epoch[key] for epoch in epochs if key in epoch]))
            for key in epochs[0]
        }
        return means | {"lr": rate}

    def keep(self, name: str, folder: Path | None = None, *, lasting: bool = False) -> None:
        """Keeps the weights of now under a name, or those of a Hugging Face folder.

        Args:
            folder: of a model of the same shape.
            lasting: checkpoints hold them, too.

        Raises:
            ConfigError: `folder` is not this model with other numbers.
        """
        if folder is None:
            self.bank.keep(name, lasting=lasting)
            return
        with self.bank.lent():
            hf_weights.load(self.bank.chunks, folder)
            self.bank.keep(name, lasting=lasting)

    def kept_logprobs(
        self,
        name: str,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
    ) -> list[npt.NDArray[np.float32]]:
        """Does as `forward_logprobs` under weights that were kept."""
        with self.bank.swapped(name, version=self.step):
            return self.forward_logprobs(trajectories, micro_batches)

    def lend(self) -> None:
        """Gives up the gradient buffers, and what torch keeps for itself, until `reclaim`.

        Between two steps. Weights stay, and of the optimizer what is not in host memory.
        """
        assert not self._works, "a batch is being trained on"
        on_gpu = self._device.type == "cuda"
        for chunk in self._wrapped:
            chunk.offload_grad_buffers(synchronize=on_gpu, empty_cache=False)
        if on_gpu:
            torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """Takes back what was lent; gradients are zero."""
        for chunk in self._wrapped:
            chunk.restore_grad_buffers(synchronize=False)

    def checkpoint_part(self, *, copy: bool) -> CheckpointPart:
        """Returns this rank's part of a checkpoint; a copy lets training go on meanwhile.

        There is one copy at a time: what an earlier one holds is lost.
        """
        return CheckpointPart(self._trainee, self.step, self._host_copy if copy else None)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint into `folder`, made if it is not there; it must be empty.

        Not atomic: save to a folder of another name, then rename it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        part = self.checkpoint_part(copy=False)
        part.write(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            part.write_names(folder, timeout_s=0.0)
        dist.barrier()

    @staticmethod
    def damage(folder: Path) -> str | None:
        """Returns why a checkpoint is not whole; None if nothing shows without reading tensors."""
        return damage(folder)

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; bitwise, if the parallel layout is the same."""
        self.step = load_checkpoint(folder, self._trainee)

    @property
    def _trainee(self) -> Trainee:
        return Trainee(self._chunks, self._optimizer, self.bank, self._seed)

    def _sum_loss(self, hidden: Tensor, work: Work) -> Tensor:
        """[] loss of a micro-batch, on the last stage; its metrics are noted."""
        logprobs, entropy = self._logprobs(hidden, work.micro_batch)
        mask = work.micro_batch.loss_mask
        if work.logprobs is None:  # first pass: the policy before the updates
            work.micro_batch = work.micro_batch.with_columns(old_logprobs=logprobs.detach())
            engine_gap.add(self._sums, work.micro_batch, self.step)
        work.logprobs = logprobs.detach()
        output = work.objective.loss(logprobs, work.micro_batch)
        self._num_tokens += (num_tokens := mask.sum())
        self._denominator += num_tokens if output.denominator is None else output.denominator
        self._sums.add("loss", output.loss.detach())
        self._sums.add("entropy", entropy.where(mask, 0).sum())
        for name, value in output.metrics.items():
            self._sums.add(name, value.detach())
        return output.loss

    def _pass_over(self, works: Sequence[Work], *, last: bool) -> None:
        with self._costs.phase("forward_backward"), grad_sync.portion(self._wrapped, last=last):
            schedule.backward(self._wrapped, works, self._sum_loss)
        self._costs.count(works)

    def _check_weights(self, epochs: Sequence[Mapping[str, float]], rate: float) -> None:
        if all(epoch["skipped"] for epoch in epochs):
            return  # they are what they were
        with self._costs.phase("update"):
            finite = distributed_adam.weights_are_finite(self._chunks)
        if not finite:
            raise TrainingError(
                f"step {self.step}: with a learning rate of {rate:g} its update made weights that "
                "are not finite; they are neither published nor saved, and a restart begins at the "
                "newest checkpoint: lower actor.optimizer.lr"
            )

    def _begin_pass(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._denominator = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sums = StepSums()
        self._sums.add("loss", torch.zeros((), device=self._device))  # there may be no trajectories

    def _end_pass(self) -> dict[str, float]:
        """Sums the gradient over ranks, divides it by their tokens and applies it."""
        result, reason = distributed_adam.Update(math.nan, done=False), "the loss is not finite"
        with self._costs.phase("update"):
            grad_sync.start_rest(self._wrapped)
            finalize_model_grads(self._wrapped)
            gradients = distributed_adam.gradients(self._optimizer)
            num_tokens = int(distributed_adam.total(self._num_tokens))
            denominator = distributed_adam.total(self._denominator) or 1.0
            metrics = self._sums.over_ranks(num_tokens) | take_metrics(self._chunks, num_tokens)
            engine_gap.settle(metrics, num_tokens)
            metrics["loss"] *= max(num_tokens, 1) / denominator
            if math.isfinite(metrics["loss"]):
                result = distributed_adam.update(self._optimizer, gradients, 1 / denominator)
                reason = "the gradient is not finite"
        if result.done:
            self._skipped_in_a_row = 0
        elif not result.has_overflowed:
            self._skipped_in_a_row += 1
            self.skip = nonfinite.explain(self._works, reason, self._skipped_in_a_row)
        if scale := distributed_adam.loss_scale(self._optimizer):
            metrics["loss_scale"] = scale
        self._begin_pass()
        return metrics | {"grad_norm": result.norm, "skipped": float(not result.done)}
