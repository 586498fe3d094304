"""Checks of engines before anything is queued."""

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.embedded import launch as embedded
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.errors import ConfigError
from relax_hpc.models import registry
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.fields import CAUSAL
from relax_hpc.roles.training.check import check_weights, of_key


def check_pools(config: RunConfig) -> None:
    """Every pool that does not follow the policy has a model, which its engines compute.

    Raises:
        ConfigError: naming the first reason why not.
    """
    for name, pool in config.engines.items():
        if follows_policy(name):
            continue  # with the rest of rollout
        path = pool.model or config.model.path
        try:
            shape = registry.read_architecture(path)
            check_weights(path, shape)
        except ConfigError as error:
            raise of_key(f"engines.{name}.model", error) from None
        check_engine(pool, shape, name=name)


def check_engine(
    pool: EnginePool, shape: Architecture, *, name: str = ROLLOUT, routed_experts: bool = False
) -> None:
    """The engines of a pool compute its model, and their own parser takes its arguments.

    Args:
        pool: which engines.
        shape: of its model.
        name: of the pool.
        routed_experts: whether they are to say which experts each token went to.

    Raises:
        ConfigError: naming the first reason why not.
    """
    key = f"engines.{name}"
    if pool.kind == "embedded" and not embedded.computes(shape):
        raise ConfigError(
            f"{key}.kind = 'embedded': does not compute models of model_type "
            f"{shape.model_type!r}; use 'sglang'"
        )
    if pool.kind == "sglang" and shape.rope.unfit_for_sglang:
        raise ConfigError(f"config.json of the model: rope_scaling: {shape.rope.unfit_for_sglang}")
    if pool.kind == "sglang" and not shape.names_class:
        raise ConfigError(
            "config.json of the model: architectures = None: SGLang goes by it; add "
            f'"architectures": ["{CAUSAL[shape.model_type]}"]'
        )
    if routed_experts and shape.experts is None:
        raise ConfigError(
            f"rollout.routed_experts = true: a model of model_type {shape.model_type!r} has no "
            "experts; leave it out"
        )
    parser = {"embedded": embedded.check, "sglang": sglang.check}[pool.kind]
    parser(pool.args, key)
    if pool.kind == "sglang":
        _check_size(key, pool, shape)


def _check_size(key: str, pool: EnginePool, shape: Architecture) -> None:
    size, resources = sglang.size_of(pool.args, key), pool.resources
    shared_by = size.tensor // size.data if size.attention_data else size.tensor
    if shared_by == 0 or shape.num_heads % shared_by:
        raise ConfigError(
            f"{key}.args.tp_size = {size.tensor}: {shape.num_heads} attention heads do "
            f"not divide by {shared_by or 'less than one rank'}; use a divisor"
        )
    if size.gpus % pool.nodes_per_engine:
        raise ConfigError(
            f"{key}.args.tp_size = {size.tensor}: does not divide over "
            f"{pool.nodes_per_engine} nodes ({key}.nodes_per_engine)"
        )
    wanted = size.gpus * pool.count // resources.nodes
    if 0 < resources.gpus_per_node < wanted:
        raise ConfigError(
            f"{key}.resources.gpus_per_node = {resources.gpus_per_node}: the engines of a node "
            f"take {wanted}; lower {key}.count or tp_size, or raise resources.nodes"
        )
