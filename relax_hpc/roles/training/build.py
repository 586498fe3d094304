"""Builds the engine that a job trains with."""

import logging

import torch

from relax_hpc.comm.world import World
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.engines.megatron import parts
from relax_hpc.engines.megatron.optimizer.settings import FIRST_LOSS_SCALE
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.models.registry import read_architecture
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)
_LARGEST_FIRST_LOSS_SCALE = 2.0**24


def trainer_of(
    config: JobConfig, world: World, device: torch.device, *, random_weights: bool = False
) -> MegatronTrainer:
    """The model of a job in the actor's layout, with its optimizer. Collective."""
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
    """The actor's. In float16 the loss scale is higher at first where tokens weigh less than 1.

    It is times the tokens that a response may have, about what such a mean divides by. One that is
    too high halves with every update that overflows; one that is too low, under which gradients
    become 0, takes a hundred updates to double.
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
    """Says how much of the model learns; rank 0 does."""
    actor = config.actor
    found = parts.counts(read_architecture(config.model.path), actor.frozen, actor.lora)
    events.emit("parameters", **found._asdict())
    log.info("trained parameters: %s, beside %s that stay", *(f"{n:,}" for n in found))
