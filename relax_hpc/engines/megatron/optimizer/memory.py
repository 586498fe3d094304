"""The GPU memory that a rank keeps between steps, counted before there is a job."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from relax_hpc.config.layout import FrozenPart, Layout, MegatronConfig
from relax_hpc.config.model import LoraConfig
from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.engines.megatron import fit, parts
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.names import Parameter
from relax_hpc.models.registry import parameters


class Held(NamedTuple):
    """Bytes that a rank keeps."""

    weights: float
    gradients: float
    optimizer: float
    """Main parameters and Adam's moments, without those in host memory."""

    def times(self, elements: float, shards: int) -> "Held":
        """Returns that of so many elements, whose optimizer is shared by ranks."""
        return Held(
            self.weights * elements, self.gradients * elements, self.optimizer * elements / shards
        )


def held(
    megatron: MegatronConfig,
    optimizer: OptimizerConfig,
    shape: Architecture,
    dtype: str,
    *,
    frozen: Collection[FrozenPart] = (),
    lora: LoraConfig | None = None,
) -> Held | None:
    """Counts what the fullest rank of a trainer keeps.

    Not the blocks up to which Megatron-core fills its buffers.

    Args:
        megatron: how it is computed.
        optimizer: how it learns.
        shape: of the model.
        dtype: of its weights.
        frozen: parts of the model that do not learn.
        lora: adapters of that rank learn, and nothing else; 0 or None: the model does.

    Returns:
        None where stages may be of a size of their own.
    """
    if fit.has_uneven_stages(megatron):
        return None
    layout = megatron.layout
    adapted = lora is not None and lora.rank > 0
    learning, staying = _per_element(optimizer, dtype), Held(_width(dtype), 0.0, 0.0)
    stages: dict[int, list[Held]] = defaultdict(list)
    for parameter in parameters(shape):
        learns = not adapted and parts.part_of(parameter.core[0]) not in frozen
        each = learning if learns else staying
        found = each.times(_elements(parameter, layout), _shards(parameter, layout))
        for stage in set(_stages(parameter, layout, shape)):
            stages[stage].append(found)
    fullest = max((_sum(each) for each in stages.values()), key=sum)
    if lora is None or not adapted:
        return fullest
    # Adapters are float32, and at most all of them on a rank.
    elements = parts.counts(shape, frozen, lora).trained
    shards = layout.data_parallel * layout.context_parallel
    return _sum([fullest, _per_element(optimizer, "float32").times(elements, shards)])


def _sum(several: Iterable[Held]) -> Held:
    return Held(*map(sum, zip(*several, strict=True)))


def _width(dtype: str) -> float:
    return 4.0 if dtype == "float32" else 2.0


def _per_element(config: OptimizerConfig, dtype: str) -> Held:
    """Bytes per element, of the optimizer per element of a rank's share."""
    width = _width(dtype)
    in_float32 = config.ddp.get("grad_reduce_in_fp32", True)
    main = 0.0 if width == 4 else 4.0
    moments = 8.0 if config.moments == "float32" else 4.0
    return Held(width, 4.0 if in_float32 else width, (main + moments) * (1 - config.offload))


def _elements(parameter: Parameter, layout: Layout) -> float:
    """Elements of it on a rank that has it."""
    if not parameter.num_experts:
        return math.prod(parameter.shard_shape(layout.tensor_parallel))
    one = math.prod(parameter.shard_shape(layout.expert_tensor_parallel))
    return one * parameter.num_experts / layout.expert_parallel


def _shards(parameter: Parameter, layout: Layout) -> int:
    """Ranks that have the same of it, and share its optimizer."""
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
