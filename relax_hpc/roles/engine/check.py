"""Checks engines and `weights.quantize` before a job is queued."""

import re

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.rollout import FP8_BLOCK, WeightsConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.inference.embedded import launch as embedded
from relax_hpc.inference.sglang import launch as sglang
from relax_hpc.inference.sglang.launch import size_of
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.training.check import of_key
from relax_hpc.trainer.models import registry
from relax_hpc.trainer.models.architecture import Architecture


def check_pools(config: RunConfig, facts: Facts) -> None:
    """Checks that every pool with fixed weights has a model that its engines support.

    Raises:
        ConfigError: the first problem.
    """
    for name, pool in config.engines.items():
        if follows_policy(name):
            continue  # with the rest of rollout
        path = pool.model or config.model.path
        try:
            shape = facts.architecture(path)
            facts.check_weights(path)
        except ConfigError as error:
            raise of_key(f"engines.{name}.model", error) from None
        check_engine(pool, shape, name=name)


def check_engine(
    pool: EnginePool, shape: Architecture, *, name: str = ROLLOUT, routed_experts: bool = False
) -> None:
    """Checks that a pool's engines support its model, and their own parser its arguments.

    Args:
        routed_experts: whether they have to return each token's experts.

    Raises:
        ConfigError: the first problem.
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
            f'"architectures": ["{registry.FAMILIES[shape.model_type].causal}"]'
        )
    if routed_experts and shape.experts is None:
        raise ConfigError(
            f"rollout.advanced.routed_experts = true: a model of model_type {shape.model_type!r} "
            "has no experts; leave it out"
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
    on_one = pool.advanced.engines_per_gpu
    if on_one > 1 and size.gpus > 1:
        raise ConfigError(
            f"{key}.advanced.engines_per_gpu = {on_one}: an engine has {size.gpus} GPUs "
            f"({key}.args.tp_size and others); engines share a GPU with one each, or use 1"
        )
    wanted = size.gpus * pool.count // on_one // resources.nodes
    if 0 < resources.gpus_per_node < wanted:
        raise ConfigError(
            f"{key}.resources.gpus_per_node = {resources.gpus_per_node}: the engines of a node "
            f"take {wanted}; lower {key}.count or tp_size, or raise resources.nodes"
        )


_DECIDED = ("quantization", "json_model_override_args", "load_format")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""SGLang fuses these into one matrix."""


def check_quantized(config: RunConfig, shape: Architecture) -> None:
    """Checks that engines support quantised weights.

    Raises:
        ConfigError: the first problem.
    """
    weights, pool = config.weights, config.rollout_pool
    if weights.quantize == "none":
        if weights.advanced.modules_to_not_convert:
            raise ConfigError(
                "weights.advanced.modules_to_not_convert = "
                f"{weights.advanced.modules_to_not_convert}: nothing is converted; set "
                "weights.quantize, or remove it"
            )
        return
    if pool.kind != "sglang":
        raise ConfigError(
            f"weights.quantize = {weights.quantize!r}: the {pool.kind} engine takes plain "
            "weights only; use engines.rollout.kind = 'sglang', or 'none'"
        )
    if config.model.dtype == "float32":
        raise ConfigError(
            f"weights.quantize = {weights.quantize!r}: such engines compute in 16 bits; set "
            "model.dtype to 'bfloat16'"
        )
    for key in _DECIDED:
        if key in pool.args:
            raise ConfigError(
                f"engines.rollout.args.{key}: is set by the run with weights.quantize = "
                f"{weights.quantize!r}; leave it out"
            )
    _check_kept(weights)
    _check_shapes(config, shape)


def _check_kept(weights: WeightsConfig) -> None:
    kept = weights.advanced.modules_to_not_convert
    for name in kept:
        if re.search(r"experts\.\d", name):
            raise ConfigError(
                f"weights.advanced.modules_to_not_convert has {name!r}: the experts of a layer are "
                "converted together; name all of them, like 'model.layers.0.mlp.experts'"
            )
        prefix, last = name[: name.rfind(".") + 1], name.split(".")[-1]
        for fused in _FUSED:
            missing = [prefix + other for other in fused if prefix + other not in kept]
            if last in fused and missing:
                raise ConfigError(
                    f"weights.advanced.modules_to_not_convert has {name!r}: engines have it in one "
                    f"matrix with {', '.join(missing)}; name them, too"
                )


def _check_shapes(config: RunConfig, shape: Architecture) -> None:
    """Checks that each rank of an engine has whole blocks of every sharded weight."""
    args = config.rollout_pool.args
    size = size_of(args)
    attention = size.tensor // size.data if size.attention_data else size.tensor
    keys = max(1, shape.num_kv_heads // attention) * shape.head_dim
    queries, experts = shape.num_heads // attention * shape.head_dim, shape.experts
    parts = {"q_proj": queries, "k_proj": keys}
    if experts:
        shared_by = size.tensor // max(1, int(str(args.get("ep_size", 1))))
        parts["an expert's gate_proj"] = experts.ffn_hidden_size // max(1, shared_by)
    if experts is None or len(experts.layers) < shape.num_layers:
        parts["gate_proj"] = shape.ffn_hidden_size // size.tensor
    for what, rows in parts.items():
        if rows % FP8_BLOCK:
            raise ConfigError(
                f"weights.quantize = 'fp8': a rank of an engine with tp_size = {size.tensor} has "
                f"{rows} rows of {what}, which is no multiple of {FP8_BLOCK}; "
                "lower tp_size, or use 'none'"
            )
