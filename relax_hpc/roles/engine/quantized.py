"""Checks of `weights.quantize` before anything is queued."""

import re

from relax_hpc.config.rollout import FP8_BLOCK, WeightsConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.sglang.launch import size_of
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture

_DECIDED = ("quantization", "json_model_override_args", "load_format")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""SGLang has them as one matrix."""


def check(config: RunConfig, shape: Architecture) -> None:
    """Engines can be given such weights.

    Raises:
        ConfigError: naming the first reason why not.
    """
    weights, pool = config.weights, config.rollout_pool
    if weights.quantize == "none":
        if weights.modules_to_not_convert:
            raise ConfigError(
                f"weights.modules_to_not_convert = {weights.modules_to_not_convert}: nothing is "
                "converted; set weights.quantize, or remove it"
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
    kept = weights.modules_to_not_convert
    for name in kept:
        if re.search(r"experts\.\d", name):
            raise ConfigError(
                f"weights.modules_to_not_convert has {name!r}: the experts of a layer are "
                "converted together; name all of them, like 'model.layers.0.mlp.experts'"
            )
        prefix, last = name[: name.rfind(".") + 1], name.split(".")[-1]
        for fused in _FUSED:
            missing = [prefix + other for other in fused if prefix + other not in kept]
            if last in fused and missing:
                raise ConfigError(
                    f"weights.modules_to_not_convert has {name!r}: engines have it in one matrix "
                    f"with {', '.join(missing)}; name them, too"
                )


def _check_shapes(config: RunConfig, shape: Architecture) -> None:
    """An engine's rank has whole blocks of whatever it has a part of."""
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
