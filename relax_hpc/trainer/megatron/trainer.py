"""Trains the actor's model on trajectories, and exports its weights under Hugging Face names."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.models.gpt import GPTModel

from relax_hpc.algorithms.composition import Objective
from relax_hpc.algorithms.entropy import EntropyState, NoEntropy
from relax_hpc.config.model import (
    FrozenPart,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    learning_rate,
)
from relax_hpc.errors import TrainingError
from relax_hpc.runtime.comm.world import World
from relax_hpc.schema import Row
from relax_hpc.trainer.megatron import adam, checkpoint_files, fit, hf_weights
from relax_hpc.trainer.megatron.checkpoint_part import (
    MegatronCheckpointPart,
    Trainee,
    has_buffers,
    load_checkpoint,
    reserve,
)
from relax_hpc.trainer.megatron.costs import Costs
from relax_hpc.trainer.megatron.fit import part_of
from relax_hpc.trainer.megatron.hf_weights import is_of_adapter
from relax_hpc.trainer.megatron.host_memory import HostCopy
from relax_hpc.trainer.megatron.metrics import measure_gap
from relax_hpc.trainer.megatron.packing import (
    LOGPROBS,
    MicroBatchWork,
    make_up_rows,
)
from relax_hpc.trainer.megatron.scorer import MegatronScorer
from relax_hpc.trainer.megatron.updates import Metrics, Updates
from relax_hpc.trainer.megatron.weight_bank import WeightBank
from relax_hpc.trainer.training_engine import LogprobGap, SkippedUpdate

_ROUTING_GAP_EVERY = 10
"""Steps between forward passes of a micro-batch without routing replay, to measure its effect."""


class MegatronTrainer(MegatronScorer):
    """One rank of the actor. All its public methods but the properties are collective.

    Ranks of a replica (tensor, pipeline and context parallel) get the same trajectories,
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
        still_steps: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        random_weights: bool = False,
        frozen: Collection[FrozenPart] = (),
        lora: LoraConfig | None = None,
    ) -> None:
        """Does as MegatronScorer, and makes gradient buffers and the optimizer.

        Args:
            num_steps: at which the learning rate reaches its end.
            still_steps: first steps without an update, before the learning rate begins.
            frozen: parts of the model that are not trained.
            lora: adapters of that rank are trained, and nothing else; 0 or None: the model is.
        """
        super().__init__(
            config, megatron, world, device,
            seed=seed, temperature=temperature, random_weights=random_weights,
        )  # fmt: skip
        fit.check_frozen(frozen, self._shape, megatron.layout)
        freeze(self._chunks, frozen)
        self._frozen = frozen
        self._notes: dict[str, Any] = {}
        if lora is not None and lora.rank:
            self._adapt(lora, seed)
        self.step = 0
        self._num_steps, self._epochs_per_step = num_steps, epochs_per_step
        self._still_steps = still_steps
        self._seed, self._rates = seed, optimizer
        self._wrapped, self._optimizer = adam.build(optimizer, self._chunks, config.dtype)
        self._run_chunks = self._wrapped
        self.bank = WeightBank(self._wrapped)
        """Further weights for this model, e.g. of a reference policy."""
        self.costs: dict[str, float] = {}
        """Costs of the last step, see `costs.Costs.end_step`."""
        self._costs = Costs(self._shape, device, weights_learn=self._lora is None)
        self._updates = Updates(
            self._chunks, self._wrapped, self._optimizer, self._costs, self._logprobs, device,
            self._encoder,
        )  # fmt: skip
        self._objective: Objective | None = None
        self._works: list[MicroBatchWork] = []
        """Works of this step; kept for further passes, and to name samples that are not finite."""
        self._mini_batches: list[int] = []
        self._passed = 0
        """Works whose logprobs under policy `step` are known."""
        self._ahead: Metrics = {}
        """Metrics of the forward pass before the updates, if there was one."""
        self._host_copy, self._waited_s = HostCopy(), 0.0
        self._has_buffers = has_buffers(self._chunks)

    def warm_up(self) -> None:
        """Trains on a dummy batch and undoes it: the first step then compiles nothing, and ranks
        get GPU memory for summing gradients before engines there take what is free.

        Call it between two steps. Does nothing if a pass would change the model.
        """
        if self._has_buffers:
            return
        assert not self._works, "a batch is being trained on"
        rows = make_up_rows(self._megatron.tokens_per_micro_batch, self._shape.vocab_size)
        works = [
            MicroBatchWork(self._build(rows, range(len(rows))), LOGPROBS, rows, number)
            for number in range(self._megatron.layout.micro_batches_multiple_of)
        ]
        self._updates.pass_over(works, last=True)
        self._updates.forget()
        self._costs.end_step()

    def accumulate(
        self,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
        objective: Objective,
        *,
        last: bool = False,
        mini_batches: Sequence[int] = (),
    ) -> None:
        """Adds a part of the batch of step `step` + 1 to the gradient.

        Gradients add up: the result does not depend on the split into parts, micro-batches and
        ranks. An empty micro-batch computes with the others and adds nothing. An objective over the
        whole batch, and mini-batches, wait for the last part.

        Args:
            trajectories: of this data-parallel rank; may be empty.
            micro_batches: indices into `trajectories`; on every rank equally many.
            last: whether no part follows, so that the sum over ranks may begin early.
            mini_batches: numbers of micro-batches in each update, in order; the same on every rank.
                Empty: one update.
        """
        works = [
            MicroBatchWork(
                self._build(trajectories, rows),
                objective,
                [trajectories[row] for row in rows],
                number,
            )
            for number, rows in enumerate(micro_batches, len(self._works))
        ]
        if self._objective is None:
            self._begin_step(objective)
        self._works += works
        self._mini_batches += mini_batches
        if objective.prepare is None and not mini_batches:
            self._updates.pass_over(works, last=last, version=self.step)
            self._passed = len(self._works)
        elif last:
            self._begin_updates()

    def engine_gap(self) -> LogprobGap | None:
        """Measures the gap between engines and this policy in the accumulated rows; before
        `update`.

        None if policy `step` sampled no trained token of them. Mini-batches not passed over yet do
        not count.
        """
        self._begin_updates()
        return measure_gap([work for work in self._works if work.number < self._passed], self.step)

    def update(self) -> dict[str, float]:
        """Turns policy `step` into policy `step` + 1 by the accumulated rows.

        The gradient is that of the loss's sum over the whole batch, on all ranks, divided by its
        denominator: the trained tokens, unless the loss has another. Mini-batches are separate
        updates, one after the other, each with its own denominator. With `epochs_per_step` > 1 all
        of that is repeated. They share a learning rate, and `old_logprobs` of policy `step`.

        Returns:
            `loss`, the loss's metrics per trained token, `entropy` [nats], `grad_norm` before
            clipping, and `skipped` updates, as the updates' mean, the same on every rank; `lr`;
            `logprob_gap/mean` and `/max` [nats] between this policy and the sampler, before the
            updates; `engine_gap/...` likewise, of the tokens that this policy sampled, if any;
            `routing/...`, see `take_metrics` and `Updates.routing_gap`, for a mixture of experts.
            An update is skipped when its loss or gradient is not finite.

        Raises:
            TrainingError: an update made the weights infinite or not a number; on every rank.
        """
        self._begin_updates()
        self._ahead |= self._routing_gap()
        self._let_change()
        self.step += 1
        rate = learning_rate(self._rates, self.step, self._num_steps, self._still_steps)
        adam.set_learning_rate(self._optimizer, rate)
        self._updates.skip = None
        parts = self._parts()
        passes = [self._updates.apply(parts[0])]
        for works in [*parts[1:], *(parts * (self._epochs_per_step - 1))]:
            self._updates.pass_over(works, last=True)
            passes.append(self._updates.apply(works))
        self._check_weights(passes, rate)
        means = {
            key: float(np.mean([each[key] for each in passes if key in each])) for key in passes[0]
        }
        means |= self._ahead | {"lr": rate}
        means |= self._end_step(means)
        self.costs = self._costs.end_step()
        if self._waited_s:
            self.costs |= {"time/save_copy": self._waited_s}
            self._waited_s = 0.0
        return means

    def keep(self, name: str, folder: Path | None = None, *, lasting: bool = False) -> None:
        """Keeps the current weights under a name, or those of a Hugging Face folder.

        Args:
            lasting: whether checkpoints hold them, too.

        Raises:
            ConfigError: `folder` is not this model with other numbers.
        """
        self._let_change()
        if folder is None:
            self.bank.keep(name, lasting=lasting)
            return
        with self.bank.lent():
            hf_weights.load(self.bank.chunks, folder)
            self.bank.keep(name, lasting=lasting)

    def forward_kept_logprobs(
        self,
        name: str,
        trajectories: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
    ) -> list[npt.NDArray[np.float32]]:
        """Does as `forward_logprobs` under kept weights."""
        self._host_copy.finish()  # part of what the caller measures
        with self.bank.swap(name, version=self.step):
            return self.forward_logprobs(trajectories, micro_batches)

    def lend(self) -> None:
        """Frees the gradient buffers, and torch's cached memory, until `reclaim`.

        Call it between two steps. Weights stay, and the optimizer state on the GPU.
        """
        assert not self._works, "a batch is being trained on"
        on_gpu = self._device.type == "cuda"
        for chunk in self._wrapped:
            chunk.offload_grad_buffers(synchronize=on_gpu, empty_cache=False)
        if on_gpu:
            torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """Takes back the lent memory; gradients are zero."""
        for chunk in self._wrapped:
            chunk.restore_grad_buffers(synchronize=False)

    def expect_saves(self) -> None:
        """Begins to take host memory for checkpoint copies; returns at once."""
        reserve(self._host_copy, self._trainee)

    def checkpoint_part(self, *, copy: bool) -> MegatronCheckpointPart:
        """Returns this rank's part of a checkpoint; a copy lets training continue meanwhile.

        It is made during the next batch's passes; changes of the model wait for it. There is one
        copy at a time: an earlier one is lost.
        """
        return MegatronCheckpointPart(self._trainee, self.step, self._host_copy if copy else None)

    damage = staticmethod(checkpoint_files.damage)

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; bitwise, if the parallel layout is the same."""
        self._let_change()
        self.step = load_checkpoint(folder, self._trainee)

    @property
    def _trainee(self) -> Trainee:
        return Trainee(self._chunks, self._optimizer, self.bank, self._seed, self._notes)

    @property
    def skip(self) -> SkippedUpdate | None:
        """Returns why the last update was skipped, if it was; the same on every rank."""
        return self._updates.skip

    def _adapt(self, lora: LoraConfig, seed: int) -> None:
        fit.check_lora(lora, self._frozen, self._shape)
        hf_weights.add_adapters(self._chunks, self._shape, lora, seed)
        freeze_all_but_adapters(self._chunks)
        self._lora, self._notes["lora"] = lora, lora.model_dump()

    def _let_change(self) -> None:
        self._waited_s += self._host_copy.finish()

    def _begin_step(self, objective: Objective) -> None:
        self._objective = objective
        if self._has_buffers:  # a pass may change them
            self._let_change()
        if "entropy" not in self._notes:
            self._notes["entropy"] = list(objective.entropy.first())
        self._updates.entropy_weight = EntropyState(*self._notes["entropy"]).weight

    def _begin_updates(self) -> None:
        """Computes forward and backward of the postponed works, up to the first update."""
        if self._objective is None or self._passed or not self._works:
            return
        first = self._parts()[0]
        self._passed = len(first)
        several = len(self._mini_batches) > 1 and self._objective.reads_old
        if self._objective.prepare or several:
            self._ahead = self._updates.look_ahead(self._works, self.step)
            self._passed = len(self._works)
        self._updates.pass_over(first, last=True, version=self.step)

    def _routing_gap(self) -> Metrics:
        """Measures, at intervals, the effect of routing replay, by a forward pass."""
        if self._routed_layers is None or self.step % _ROUTING_GAP_EVERY or not self._passed:
            return {}
        count = self._megatron.layout.micro_batches_multiple_of
        return self._updates.routing_gap(self._works[:count])

    def _parts(self) -> list[list[MicroBatchWork]]:
        if not self._mini_batches:
            return [self._works]
        works = iter(self._works)
        return [list(islice(works, size)) for size in self._mini_batches]

    def _end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Forgets the batch, and sets the entropy's weight for the next step."""
        found = {}
        objective, entropy = self._objective, metrics.get("entropy", math.nan)
        if objective is not None and not isinstance(objective.entropy, NoEntropy):
            found["loss/entropy_weight"] = self._updates.entropy_weight
            if math.isfinite(entropy) and metrics["skipped"] < 1:
                state = EntropyState(*self._notes["entropy"])
                self._notes["entropy"] = list(objective.entropy.after(state, entropy))
        self._objective, self._works, self._mini_batches = None, [], []
        self._passed, self._ahead = 0, {}
        return found

    def _check_weights(self, epochs: Sequence[Mapping[str, float]], rate: float) -> None:
        if all(epoch["skipped"] for epoch in epochs):
            return  # they are what they were
        with self._costs.phase("update"):
            finite = adam.weights_are_finite(self._chunks)
        if not finite:
            raise TrainingError(
                f"step {self.step}: with a learning rate of {rate:g} its update made weights that "
                "are not finite; they are neither published nor saved, and a restart begins at the "
                "newest checkpoint: lower actor.optimizer.lr"
            )


def freeze(chunks: Sequence[GPTModel], frozen: Collection[FrozenPart]) -> None:
    """Marks parameters; call it before gradient buffers and the optimizer are made."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)


def freeze_all_but_adapters(chunks: Sequence[GPTModel]) -> None:
    """Does as `freeze` with the whole model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_of_adapter(name))
