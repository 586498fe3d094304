"""Builds what all ranks that hold a model have: torch's group, the model, checkpoints, saves."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch

from relax_hpc.bus.plan import PlanPosition, is_planned
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.config.model import OptimizerConfig, SavingConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.roles.role import C, ModelRank
from relax_hpc.runtime.comm.torch_group import init_torch, own_device
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.trainer.checkpoints import best, saving
from relax_hpc.trainer.checkpoints.saving import Saving, SavingRank0
from relax_hpc.trainer.checkpoints.store import Checkpoint, Checkpoints, P
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.megatron.settings import FIRST_LOSS_SCALE
from relax_hpc.trainer.megatron.trainer import MegatronTrainer
from relax_hpc.trainer.models.registry import read_architecture
from relax_hpc.trainer.training_engine import TrainingEngine

log = logging.getLogger(__name__)
_LARGEST_FIRST_LOSS_SCALE = 2.0**24
M = TypeVar("M")


class RankStart(Generic[C]):
    """The start of a rank that holds a model, and its end. Methods are collective but for logs."""

    def __init__(self, rank: ModelRank[C]) -> None:
        self._rank = rank
        self.device = own_device(rank.context.local_rank, asked=rank.context.gpus)
        self.timers = Timers()

    def build(self, make: Callable[[torch.device], M]) -> M:
        """Joins torch's group, and makes the model."""
        with self.timers("model"):
            init_torch(self._rank.world, device="cuda" if self.device.type == "cuda" else "cpu")
            return make(self.device)

    def resume(
        self, checkpoints: Checkpoints[P], model: TrainingEngine, *, is_critic: bool = False
    ) -> Checkpoint[P] | None:
        """Loads the newest complete checkpoint, if any."""
        with self.timers("load"):
            return saving.resume(checkpoints, model, self._rank.events, is_critic=is_critic)

    def save(
        self,
        when: SavingConfig,
        model: TrainingEngine,
        checkpoints: Checkpoints[P],
        rank0: SavingRank0[P] | None,
    ) -> Saving[P]:
        """Returns what saves after steps."""
        rank, config = self._rank, self._rank.config
        return Saving(
            when, rank.paths, rank.world, model, checkpoints, rank0, rank.events,
            num_steps=config.num_steps, source=config.model.path,
        )  # fmt: skip

    def log_phases(self) -> None:
        self._rank.events.emit("phases", step=0, phases=self.timers.phases)

    def end(self) -> None:
        self._rank.world.barrier()
        torch.distributed.destroy_process_group()


def checkpoints_on_plan(
    rank: ModelRank[RunConfig], when: SavingConfig, folder: Path
) -> Checkpoints[PlanPosition]:
    """Makes the checkpoints of a model that learns from planned batches."""
    paths, name, stay = rank.paths, rank.config.actor.advanced.keep_best, None
    if name is not None and folder == paths.checkpoints:
        stay = partial(best.to_keep, paths, name, rank.config.eval[name].every)
    return saving.checkpoints_of(
        when, paths, rank.world, PlanPosition,
        timeout_s=rank.config.launch.advanced.peer_timeout_s,
        is_valid=lambda position: is_planned(paths.bus, position),
        lacks=partial(saving.lack_of, paths), best=stay, folder=folder,
    )  # fmt: skip


def sidecar_writer(rank: ModelRank[RunConfig], model: Path) -> SidecarWriter:
    context, config = rank.context, rank.config
    provenance: dict[str, str | int] = {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "start": context.start,
        "node": context.node,
        "model": str(model),
    }
    return SidecarWriter(
        rank.paths.bus, context.name, provenance, compress=config.bus.advanced.compress
    )


def trainer_of(
    config: JobConfig, world: World, device: torch.device, *, random_weights: bool = False
) -> MegatronTrainer:
    """Builds the model of a job in the actor's layout, with its optimizer. Collective."""
    return MegatronTrainer(
        config.model,
        config.actor,
        _optimizer_of(config),
        world,
        device,
        num_steps=config.num_steps,
        epochs_per_step=config.epochs_per_step,
        still_steps=config.steps_of_critic_alone,
        seed=config.seed,
        temperature=config.temperature,
        random_weights=random_weights,
        frozen=config.actor.frozen,
        lora=config.actor.lora,
    )


def _optimizer_of(config: JobConfig) -> OptimizerConfig:
    """Returns the actor's settings; in float16 with a higher initial loss scale if token weights
    are below 1.

    The scale is multiplied by the most tokens of a response, about the divisor of such a mean. A
    scale too high halves with every update that overflows; one too low, at which gradients become
    0, takes a hundred updates to double.
    """
    optimizer = config.actor.optimizer
    if config.model.dtype != "float16" or not isinstance(config, RunConfig):
        return optimizer
    if config.algorithm.aggregation in ("token", "sequence_sum"):
        return optimizer
    power_of_two = 2.0 ** (config.rollout.max_new_tokens.bit_length() - 1)
    first = min(FIRST_LOSS_SCALE * power_of_two, _LARGEST_FIRST_LOSS_SCALE)
    megatron = {"initial_loss_scale": first, **optimizer.megatron}
    return optimizer.model_copy(update={"megatron": megatron})


def tell_parameters(config: JobConfig, events: EventWriter) -> None:
    """Logs how much of the model is trained, on rank 0."""
    actor = config.actor
    found = fit.count_elements(read_architecture(config.model.path), actor.frozen, actor.lora)
    events.emit("parameters", **found._asdict())
    log.info("trained parameters: %s, beside %s that stay", *(f"{n:,}" for n in found))
