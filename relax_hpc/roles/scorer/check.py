"""Checks of the reference before anything is queued."""

from dataclasses import fields

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.roles.training.check import (
    check_model,
    check_sees_alike,
    check_weights,
    check_window,
    of_key,
)


def check_reference(config: RunConfig, shape: Architecture) -> None:
    """The reference reads the same tokens; in the trainer's place it has the trainer's shape."""
    reference = config.reference
    if reference.placement == "none":
        return
    path = config.reference_model.path
    try:
        found = check_model(
            path, config.reference_megatron if reference.placement == "own" else config.actor
        )
        check_weights(path, found)
    except ConfigError as error:
        raise of_key("reference.path", error) from None
    check_sees_alike(config, path, "reference.path")
    check_window(config, f"reference.path = {str(path)!r}", found, shape)
    of_length = {"max_positions", "is_window"}
    names = [field.name for field in fields(Architecture) if field.name not in of_length]
    own = reference.placement == "own"
    for name in ["vocab_size"] if own else names:
        if getattr(found, name) != getattr(shape, name):
            raise ConfigError(
                f"reference.path = {str(path)!r}: {name} is {getattr(found, name)} in its "
                f"config.json, {getattr(shape, name)} in model.path's; use a model of the same "
                f"{'tokenizer' if own else 'shape, or placement = own'}"
            )
