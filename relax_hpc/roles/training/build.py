"""Builds the engine that a job trains with."""

import logging

import torch

from relax_hpc.comm.world import World
from relax_hpc.config.run import JobConfig
from relax_hpc.engines.megatron import parts
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.models.registry import read_architecture
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)


def trainer_of(
    config: JobConfig, world: World, device: torch.device, *, random_weights: bool = False
) -> MegatronTrainer:
    """The model of a job in the actor's layout, with its optimizer. Collective."""
    return MegatronTrainer(
        config.model,
        config.actor,
        config.actor.optimizer,
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


def tell_parameters(config: JobConfig, events: EventWriter) -> None:
    """Says how much of the model learns; rank 0 does."""
    actor = config.actor
    found = parts.counts(read_architecture(config.model.path), actor.frozen, actor.lora)
    events.emit("parameters", **found._asdict())
    log.info("trained parameters: %s, beside %s that stay", *(f"{n:,}" for n in found))
