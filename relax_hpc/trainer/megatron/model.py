"""Builds the model on stock Megatron-core from its TransformerConfig."""

from functools import partial
from typing import Any, ClassVar, cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from relax_hpc.trainer.megatron.layers import experts, router
from relax_hpc.trainer.megatron.layers.attention import AttentionKernel, PackedAttention, PackedRows
from relax_hpc.trainer.megatron.layers.attention_kernels import of_towers
from relax_hpc.trainer.megatron.layers.dense import (
    FusedSelfAttention,
    PackedLayer,
    RMSNorm,
    RotaryByPosition,
    residual_add,
)
from relax_hpc.trainer.megatron.layers.gradient_fusion import RowsEmbedding
from relax_hpc.trainer.megatron.layers.logprobs import LogprobHead, hidden_logprobs
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.towers import SoundTower, VisionTower


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's, but its last stage returns hidden states; `logprobs` processes them."""

    architecture: Architecture
    """Architecture of the whole model; this may be a part of its layers."""
    has_vocabulary: ClassVar[bool] = True

    vision: VisionTower | None
    """The vision encoder, if any, in the first chunk; it is no part of `forward`."""
    audio: SoundTower | None
    """The audio encoder, likewise."""

    def _preprocess(
        self,
        *args: Any,  # noqa: ANN401
        packed_seq_params: PackedRows,
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Any, ...]:
        embedded, *others = super()._preprocess(
            *args, packed_seq_params=packed_seq_params, **kwargs
        )
        if not self.pre_process:
            return embedded, *others
        if torch.is_grad_enabled() and not embedded.requires_grad:
            embedded = embedded.detach().requires_grad_()  # frozen: what it costs is in towers
        if packed_seq_params.seen is not None:
            embedded = packed_seq_params.seen.in_place_of(embedded)
        return embedded, *others

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states

    def logprobs(self, hidden: Tensor, targets: Tensor, head: LogprobHead) -> tuple[Tensor, Tensor]:
        """Returns [T] logprobs of `targets`, with gradient, and [T] entropy; T of this rank.

        Args:
            hidden: [T, 1, h], or this rank's part of T under sequence parallelism.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=head.group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=head.group)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return hidden_logprobs(hidden.squeeze(1), weight, targets, head)


def build(
    config: TransformerConfig,
    shape: Architecture,
    device: torch.device,
    attend: AttentionKernel,
    kind: type[PackedGPT] = PackedGPT,
) -> list[PackedGPT]:
    """Builds this rank's chunks of layers, in order, weights uninitialised; groups must exist.

    Raises:
        ConfigError: the dispatcher for experts is not installed.
    """
    experts.check_installed(config)
    stages = config.virtual_pipeline_model_parallel_size
    if stages is None:
        return [_build_chunk(config, shape, device, attend, kind, None)]
    return [_build_chunk(config, shape, device, attend, kind, stage) for stage in range(stages)]


def _build_chunk(
    config: TransformerConfig,
    shape: Architecture,
    device: torch.device,
    attend: AttentionKernel,
    kind: type[PackedGPT],
    vp_stage: int | None,
) -> PackedGPT:
    first = get_transformer_layer_offset(config, vp_stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    is_tied = shape.tied_embeddings and kind.has_vocabulary
    model = kind(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[_layer(config, attend, has_experts=_has_experts(config, n)) for n in own],
            layer_norm=RMSNorm,
        ),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="mrope",
        vp_stage=vp_stage,
    )
    model.architecture = shape
    model.vision = model.audio = None
    if shape.experts:
        router.set_shares(model, normalised=shape.experts.norm_topk_prob)
    if model.pre_process:
        RowsEmbedding.replace(
            model.embedding.word_embeddings,
            is_output=model.post_process and is_tied,
        )
        if shape.vision:
            model.vision = VisionTower(shape.vision, of_towers(attend))
            _as_tower(model.vision, config)
        if shape.audio:
            model.audio = SoundTower(shape.audio, of_towers(attend))
            _as_tower(model.audio, config)
    model.rotary_pos_emb = RotaryByPosition(shape.rope, shape.head_dim, device)
    return cast(PackedGPT, model.to(device))


def _as_tower(tower: torch.nn.Module, config: TransformerConfig) -> None:
    tower.to(config.params_dtype)
    for parameter in tower.parameters():
        # Each tensor-parallel rank encodes other media: gradients are summed, as those of norms.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def _layer(config: TransformerConfig, attend: AttentionKernel, *, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.module = PackedLayer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add
    layer.submodules.self_attention.module = FusedSelfAttention
    attention = layer.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = partial(PackedAttention, attend=attend)
    if has_experts:
        return experts.with_experts(layer)
    return layer
