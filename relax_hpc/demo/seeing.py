"""A complete Qwen3-VL, dense or with experts, small enough for one CPU core, made offline.

Its folder is one of the hub's, with less of everything: a tower whose features also go into the
first layers, rotary positions in three dimensions, experts that are not square.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from relax_hpc.demo import checkpoint, shapes
from relax_hpc.models.hf_files import SINGLE
from relax_hpc.records import write_json

Kind = Literal["vl", "vl-moe"]

VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEXT = {
    "vocab_size": checkpoint.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}
PATCHES = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
_IMAGES = PATCHES | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
}
_VIDEOS = PATCHES | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 8 * 256 * 256},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 16,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny text model's, with tokens of images and videos; a colour is one token."""
    return checkpoint.tokenizer(
        special=[*checkpoint.SPECIAL, VISION_START, VISION_END, IMAGE, VIDEO],
        words=[*checkpoint.WORDS, shapes.QUESTION, *shapes.COLOURS],
        chat_template=CHAT_TEMPLATE,
    )


def model(kind: Kind, tokens: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """A Qwen3-VL with random float32 weights drawn from `seed`."""
    ids: dict[str, Any] = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            tokens.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE, VIDEO]),
            strict=True,
        )
    )
    text: dict[str, Any] = TEXT | {"pad_token_id": tokens.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: PreTrainedModel
        if kind == "vl":
            made = Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(
                    text_config=text | {"tie_word_embeddings": True},
                    vision_config=VISION,
                    tie_word_embeddings=True,
                    **ids,
                )
            )
        else:
            made = Qwen3VLMoeForConditionalGeneration(
                Qwen3VLMoeConfig(
                    text_config=text | EXPERTS | {"tie_word_embeddings": False},
                    vision_config=VISION,
                    tie_word_embeddings=False,
                    **ids,
                )
            )
    return made.float().eval()


def save(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes what `checkpoint.save` writes, and how images and videos are made."""
    checkpoint.save(folder, made, tokens)
    _transpose_experts(folder / SINGLE)
    write_json(folder / "preprocessor_config.json", _IMAGES)
    write_json(folder / "video_preprocessor_config.json", _VIDEOS)


def _transpose_experts(file: Path) -> None:
    """Turns experts as the hub's folders have them; transformers saves them as it computes."""
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
