"""What can be known to be wrong with engines before anything is queued."""

from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.engines.embedded import launch as embedded
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture


def check_engine(rollout: RolloutConfig, shape: Architecture) -> None:
    """The engine computes the model, and its own parser takes `rollout.engine_args`."""
    if rollout.engine == "embedded" and shape.model_type != "qwen3":
        raise ConfigError(
            f"rollout.engine = 'embedded': does not compute models of model_type "
            f"{shape.model_type!r}; use 'sglang'"
        )
    if rollout.engine == "sglang" and shape.rope.unfit_for_sglang:
        raise ConfigError(f"config.json of the model: rope_scaling: {shape.rope.unfit_for_sglang}")
    if rollout.routed_experts and shape.experts is None:
        raise ConfigError(
            f"rollout.routed_experts = true: a model of model_type {shape.model_type!r} has no "
            "experts; leave it out"
        )
    parser = {"embedded": embedded.check, "sglang": sglang.check}[rollout.engine]
    parser(rollout.engine_args)
    if rollout.engine == "sglang":
        _check_size(rollout, shape)


def _check_size(rollout: RolloutConfig, shape: Architecture) -> None:
    size, resources = sglang.size_of(rollout.engine_args), rollout.resources
    shared_by = size.tensor // size.data if size.attention_data else size.tensor
    if shared_by == 0 or shape.num_heads % shared_by:
        raise ConfigError(
            f"rollout.engine_args.tp_size = {size.tensor}: {shape.num_heads} attention heads do "
            f"not divide by {shared_by or 'less than one rank'}; use a divisor"
        )
    if size.gpus % rollout.nodes_per_engine:
        raise ConfigError(
            f"rollout.engine_args.tp_size = {size.tensor}: does not divide over "
            f"{rollout.nodes_per_engine} nodes (rollout.nodes_per_engine)"
        )
    wanted = size.gpus * rollout.num_engines // resources.nodes
    if 0 < resources.gpus_per_node < wanted:
        raise ConfigError(
            f"rollout.resources.gpus_per_node = {resources.gpus_per_node}: the engines of a node "
            f"take {wanted}; lower rollout.num_engines or tp_size, or raise resources.nodes"
        )
