"""Checks that a layout fits the model, and counts what a rank holds of it, before there is a job.

Every matrix, expert and layer has one place. Needs no torch.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from relax_hpc.config.model import (
    FrozenPart,
    Layout,
    LoraConfig,
    MegatronConfig,
    OptimizerConfig,
)
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import qwen3_omni_moe, qwen3_vl
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.names import Adapter, Parameter
from relax_hpc.trainer.models.registry import parameters

_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `transformer` that divide the layers unevenly."""


class _Split(NamedTuple):
    key: str
    ranks: int
    size: int
    what: str


def check(config: MegatronConfig, shape: Architecture) -> None:
    """Checks that a layout divides the model.

    Raises:
        ConfigError: has the key and the number to divide.
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
    return any(config.transformer.get(name) for name in _UNEVEN_STAGES)


def check_frozen(frozen: Collection[FrozenPart], shape: Architecture, layout: Layout) -> None:
    """Checks that the frozen parts exist, and that something is left to train.

    Raises:
        ConfigError: has the part and a remedy.
    """
    if not frozen:
        return
    said = f"actor.frozen = {list(frozen)}"
    parts = _list_parts(shape)
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
    """Checks that the model can have these adapters.

    Raises:
        ConfigError: has the key and a remedy.
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


def _list_parts(shape: Architecture) -> set[FrozenPart]:
    """Returns the parts of a model; none if it has only one."""
    found = set[FrozenPart]()
    if shape.vision:
        found |= {"language", "vision", "vision_projection"}
    if shape.audio:
        found |= {"audio", "audio_projection"}
    return found


def _check_first_stage(config: MegatronConfig, shape: Architecture) -> None:
    """Checks that the first layers, which get features of media, are on the encoders' stage."""
    if shape.vision is None or has_uneven_stages(config):
        return  # of uneven stages `settings.transformer_config` says it
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


class ParameterCounts(NamedTuple):
    """The elements of all parameters of a model."""

    trained: int
    fixed: int
    """Elements that stay unchanged: frozen, or adapted."""


def count_elements(
    shape: Architecture, frozen: Collection[FrozenPart], lora: LoraConfig
) -> ParameterCounts:
    """Counts the trained elements, whatever the grid."""
    trained = fixed = 0
    for parameter in parameters(shape):
        matrices = list(parameter.hf.values())
        size = sum(map(math.prod, matrices)) * (parameter.num_experts or 1)
        learns = not lora.rank and part_of(parameter.core[0]) not in frozen
        trained, fixed = trained + size * learns, fixed + size * (not learns)
        if adapter := Adapter.of(parameter, lora.rank, lora.targets) if lora.rank else None:
            trained += lora.rank * sum(sum(matrices[source]) for source in adapter.sources)
    return ParameterCounts(trained, fixed)


def part_of(name: str) -> FrozenPart:
    """Returns the part of a parameter, by its name in the model."""
    if name.startswith(qwen3_vl.CORE):
        return "vision_projection" if "merger" in name.split(".")[1] else "vision"
    if name.startswith(qwen3_omni_moe.CORE):
        return "audio_projection" if name.split(".")[1].startswith("proj") else "audio"
    return "language"


class Held(NamedTuple):
    """Bytes that a rank keeps."""

    weights: float
    gradients: float
    optimizer: float
    """Main parameters and Adam's moments, without those in host memory."""

    def times(self, elements: float, shards: int) -> "Held":
        """Returns the total for so many elements, with the optimizer shared by `shards` ranks."""
        return Held(
            self.weights * elements, self.gradients * elements, self.optimizer * elements / shards
        )


def count_held(
    megatron: MegatronConfig,
    optimizer: OptimizerConfig,
    shape: Architecture,
    dtype: str,
    *,
    frozen: Collection[FrozenPart] = (),
    lora: LoraConfig | None = None,
) -> Held | None:
    """Computes what the fullest rank of a trainer keeps, without Megatron-core's padding of
    buffers.

    Args:
        frozen: parts of the model that are not trained.
        lora: adapters of that rank are trained, and nothing else; 0 or None: the model is.

    Returns:
        None if stages may have different sizes.
    """
    if has_uneven_stages(megatron):
        return None
    layout = megatron.layout
    adapted = lora is not None and lora.rank > 0
    learning, staying = _per_element(optimizer, dtype), Held(_width(dtype), 0.0, 0.0)
    stages: dict[int, list[Held]] = defaultdict(list)
    for parameter in parameters(shape):
        learns = not adapted and part_of(parameter.core[0]) not in frozen
        each = learning if learns else staying
        found = each.times(_elements(parameter, layout), _shards(parameter, layout))
        for stage in set(_stages(parameter, layout, shape)):
            stages[stage].append(found)
    fullest = max((_sum(each) for each in stages.values()), key=sum)
    if lora is None or not adapted:
        return fullest
    # Adapters are float32, and at most all of them on a rank.
    elements = count_elements(shape, frozen, lora).trained
    shards = layout.data_parallel * layout.context_parallel
    return _sum([fullest, _per_element(optimizer, "float32").times(elements, shards)])


def _sum(several: Iterable[Held]) -> Held:
    return Held(*map(sum, zip(*several, strict=True)))


def _width(dtype: str) -> float:
    return 4.0 if dtype == "float32" else 2.0


def _per_element(config: OptimizerConfig, dtype: str) -> Held:
    """Returns bytes per element; of the optimizer per element of a rank's share."""
    width = _width(dtype)
    in_float32 = config.ddp.get("grad_reduce_in_fp32", True)
    main = 0.0 if width == 4 else 4.0
    moments = 8.0 if config.moments == "float32" else 4.0
    return Held(width, 4.0 if in_float32 else width, (main + moments) * (1 - config.offload))


def _elements(parameter: Parameter, layout: Layout) -> float:
    if not parameter.num_experts:
        return math.prod(parameter.shard_shape(layout.tensor_parallel))
    one = math.prod(parameter.shard_shape(layout.expert_tensor_parallel))
    return one * parameter.num_experts / layout.expert_parallel


def _shards(parameter: Parameter, layout: Layout) -> int:
    """Returns the number of ranks with the same part, which share its optimizer."""
    if not parameter.num_experts:
        return layout.data_parallel * layout.context_parallel
    of_stage = layout.world_size // layout.pipeline_parallel
    return of_stage // (layout.expert_parallel * layout.expert_tensor_parallel)


def _stages(parameter: Parameter, layout: Layout, shape: Architecture) -> Iterator[int]:
    """Yields the pipeline stages that have it; embeddings may be on two."""
    stages = layout.pipeline_parallel
    per_chunk = shape.num_layers // (stages * layout.virtual_pipeline)
    for name in parameter.core:
        place, *rest = name.removeprefix("decoder.").split(".")
        if place == "layers" and name.startswith("decoder."):
            yield int(rest[0]) // per_chunk % stages
        else:
            yield stages - 1 if place in ("output_layer", "final_layernorm") else 0
