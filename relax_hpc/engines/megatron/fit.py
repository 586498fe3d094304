"""Whether the layout of a job fits the model: every matrix, expert and layer has one place."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from relax_hpc.config.layout import FrozenPart, Layout, MegatronConfig
from relax_hpc.config.model import LoraConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.names import Adapter
from relax_hpc.models.registry import parameters

_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `transformer` that share the layers out otherwise than evenly."""


class _Split(NamedTuple):
    key: str
    """Key of the layout."""
    ranks: int
    size: int
    what: str


def check(config: MegatronConfig, shape: Architecture) -> None:
    """Refuses a layout that does not divide the model.

    Raises:
        ConfigError: naming the key and what it has to divide.
    """
    layout, section = config.layout, f"{config.section}.layout"
    if shape.experts is None and layout.expert_parallel * layout.expert_tensor_parallel > 1:
        key = "expert_parallel" if layout.expert_parallel > 1 else "expert_tensor_parallel"
        raise ConfigError(
            f"{section}.{key} = {getattr(layout, key)}: a model of model_type "
            f"{shape.model_type!r} has no experts; use 1"
        )
    for key, ranks, size, what in _splits(config, shape):
        if size % ranks:
            raise ConfigError(
                f"{section}.{key} = {ranks}: does not divide the model's {size} {what}; "
                "use a divisor of it"
            )
    _check_first_stage(config, shape)
    tensor, heads = layout.tensor_parallel, shape.num_kv_heads
    if max(tensor, heads) % min(tensor, heads):
        raise ConfigError(
            f"{section}.tensor_parallel = {tensor}: does not divide the model's {heads} "
            "key-value heads, nor they it; use a divisor or a multiple"
        )


def has_uneven_stages(config: MegatronConfig) -> bool:
    """Whether pipeline stages may have other numbers of layers than each other."""
    return any(config.transformer.get(name) for name in _UNEVEN_STAGES)


def check_frozen(frozen: Collection[FrozenPart], shape: Architecture, layout: Layout) -> None:
    """Refuses parts that the model does not have, and a model of which nothing learns.

    Raises:
        ConfigError: naming the part, and what can be done.
    """
    if not frozen:
        return
    said = f"actor.frozen = {list(frozen)}"
    parts = _parts(shape)
    if missing := sorted(set(frozen) - parts):
        has = f"only {', '.join(sorted(parts))}" if parts else "no parts"
        raise ConfigError(
            f"{said}: a model of model_type {shape.model_type!r} has {has}; remove "
            f"{', '.join(missing)}"
        )
    if set(frozen) == parts:
        raise ConfigError(f"{said}: nothing would learn; leave one out")
    if "language" in frozen and layout.pipeline_parallel > 1:
        raise ConfigError(
            f"{said}: only the first pipeline stage would have something to learn; use "
            "actor.layout.pipeline_parallel = 1"
        )


def check_lora(lora: LoraConfig, frozen: Collection[FrozenPart], shape: Architecture) -> None:
    """Refuses adapters of what cannot be adapted.

    Raises:
        ConfigError: naming the key, and what can be done.
    """
    if not lora.rank:
        return
    if frozen:
        raise ConfigError(
            f"actor.frozen = {list(frozen)}: with actor.lora.rank = {lora.rank} all of the model "
            "stays as it is, and only what is added to it learns; remove it"
        )
    beside = [target for target in lora.targets if target not in _OF_ATTENTION]
    if shape.experts and beside:
        raise ConfigError(
            f"actor.lora.targets = {lora.targets}: experts cannot be adapted; use "
            f"{list(_OF_ATTENTION)}, or some of them"
        )
    for parameter in parameters(shape):
        if Adapter.of(parameter, lora.rank, lora.targets) is None:
            continue
        for name, sizes in parameter.hf.items():
            target = name.split(".")[-2]
            if target in lora.targets and lora.rank > min(sizes):
                raise ConfigError(
                    f"actor.lora.rank = {lora.rank}: a {target} of {sizes[0]} x {sizes[1]} has no "
                    f"such rank; use {min(sizes)} at most, or leave {target} out of "
                    "actor.lora.targets"
                )


_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _parts(shape: Architecture) -> set[FrozenPart]:
    """The parts that a model has; none if it is all of one."""
    found = set[FrozenPart]()
    if shape.vision:
        found |= {"language", "vision", "vision_projection"}
    if shape.audio:
        found |= {"audio", "audio_projection"}
    return found


def _check_first_stage(config: MegatronConfig, shape: Architecture) -> None:
    """Features of media go into the first layers; those have to be where the tower is."""
    if shape.vision is None or has_uneven_stages(config):
        return  # of uneven stages `transformer_config` says it
    layout, taps = config.layout, len(shape.vision.taps)
    stages = layout.pipeline_parallel * layout.virtual_pipeline
    if shape.num_layers // stages < taps:
        raise ConfigError(
            f"{config.section}.layout.pipeline_parallel x virtual_pipeline = {stages}: leaves "
            f"{shape.num_layers // stages} layers to the first stage, and features of images go "
            f"into the model's first {taps}; use at most {shape.num_layers // taps} stages"
        )


def _splits(config: MegatronConfig, shape: Architecture) -> Iterator[_Split]:
    layout, experts = config.layout, shape.experts
    tensor = layout.tensor_parallel
    yield _Split("tensor_parallel", tensor, shape.num_heads, "attention heads")
    yield _Split("tensor_parallel", tensor, shape.vocab_size, "vocabulary entries")
    if experts is None or len(experts.layers) < shape.num_layers:
        yield _Split("tensor_parallel", tensor, shape.ffn_hidden_size, "feed-forward channels")
    if experts is not None:
        yield _Split("expert_parallel", layout.expert_parallel, experts.num_experts, "experts")
        yield _Split(
            "expert_tensor_parallel", layout.expert_tensor_parallel, experts.ffn_hidden_size,
            "channels of an expert",
        )  # fmt: skip
    if not has_uneven_stages(config):
        stages, key = layout.pipeline_parallel, "pipeline_parallel"
        if layout.virtual_pipeline > 1:
            stages, key = stages * layout.virtual_pipeline, f"{key} x virtual_pipeline"
        yield _Split(key, stages, shape.num_layers, "layers")
