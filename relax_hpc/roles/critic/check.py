"""Checks of the critic before anything is queued."""

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.roles.training.check import (
    check_first_weights,
    check_model,
    check_weights,
    of_key,
)


def check_critic(config: RunConfig, shape: Architecture) -> None:
    """The critic reads the same tokens, its layout divides it, and its weights are its own."""
    critic = config.critic
    if critic is None:
        return
    if shape.vision:
        raise ConfigError(
            f"critic: is shown no media, and model.path = {str(config.model.path)!r} is; use an "
            "algorithm without one, e.g. algorithm.preset = 'grpo'"
        )
    model = critic.model(config.model)
    try:
        found = check_model(model.path, critic.megatron(config.actor))
        check_weights(model.path, found)
    except ConfigError as error:
        raise of_key("critic.path", error) from None
    if found.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"critic.path = {str(critic.path)!r}: vocab_size is {found.vocab_size} in its "
            f"config.json, {shape.vocab_size} in model.path's; use a model of the same tokenizer"
        )
    check_first_weights(critic.weights, found, section="critic", has_vocabulary=False)
