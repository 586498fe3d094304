"""A complete Qwen3-Omni, small enough for one CPU core, made offline.

Its folder is one of the hub's, with less of everything: a thinker that sees and hears, and a talker
and its code2wav, which nothing here asks.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

from relax_hpc.demo import checkpoint, seeing, shapes, tones
from relax_hpc.records import write_json

AUDIO_START, AUDIO_END, AUDIO = "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"
_TOKENS = [
    seeing.VISION_START, seeing.VISION_END, seeing.IMAGE, seeing.VIDEO,
    AUDIO_START, AUDIO_END, AUDIO,
]  # fmt: skip
_IDS = (
    "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id",
    "audio_start_token_id", "audio_end_token_id", "audio_token_id",
)  # fmt: skip
"""Names of their ids in config.json."""
_ASKED = (
    "vision_bos_token", "vision_eos_token", "image_token", "video_token",
    "audio_bos_token", "audio_eos_token", "audio_token",
)  # fmt: skip
"""Names by which the processor of transformers asks its tokenizer for them."""
CHAT_TEMPLATE = seeing.CHAT_TEMPLATE.replace(
    "{%- elif part.type == 'video' %}",
    "{%- elif part.type == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- elif part.type == 'video' %}",
)

_AUDIO = {
    "num_mel_bins": 128,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "n_window": 50,
    "n_window_infer": 200,
}
_SPEAKS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_TALKER = {
    "text_config": _SPEAKS
    | {
        "vocab_size": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "code_predictor_config": _SPEAKS | {"vocab_size": 32, "num_code_groups": 4},
    "thinker_hidden_size": 64,
    "num_code_groups": 4,
    "spatial_merge_size": 2,
    "accept_hidden_layer": 2,
}
_CODE2WAV = {
    "codebook_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "decoder_dim": 32,
    "num_quantizers": 4,
}
_PREPROCESSOR = seeing.PATCHES | {
    "processor_class": "Qwen3OmniMoeProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 64 * 64,
    "max_pixels": 256 * 256,
    "min_frames": 4,
    "max_frames": 16,
    "fps": 2,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny model that sees, with tokens of sounds; a pitch is one token."""
    return checkpoint.tokenizer(
        special=[*checkpoint.SPECIAL, *_TOKENS],
        words=[
            *checkpoint.WORDS, shapes.QUESTION, *shapes.COLOURS, tones.QUESTION, *tones.PITCHES,
        ],
        chat_template=CHAT_TEMPLATE,
        named=dict(zip(_ASKED, _TOKENS, strict=True)),
    )  # fmt: skip


def model(tokens: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """A Qwen3-Omni with random float32 weights drawn from `seed`."""
    ids: dict[str, Any] = dict(zip(_IDS, tokens.convert_tokens_to_ids(_TOKENS), strict=True))
    text = seeing.TEXT | seeing.EXPERTS
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text
            | {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id},
            "vision_config": seeing.VISION,
            "audio_config": _AUDIO,
            "position_id_per_seconds": 13,
            **ids,
        },
        talker_config=_TALKER,
        code2wav_config=_CODE2WAV,
        enable_audio_output=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Qwen3OmniMoeForConditionalGeneration(config).float().eval()
        for parameter in towers(made)["audio_tower"].parameters():
            if parameter.ndim > 1:  # else so few channels let nothing through
                torch.nn.init.kaiming_normal_(parameter)
        for name, parameter in made.talker.named_parameters():
            if ".experts." in name:  # transformers leaves them as memory is
                torch.nn.init.normal_(parameter, std=0.02)
    return made


def towers(made: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The towers of the thinker by name; their place in it differs between versions of
    transformers."""
    named = ((name.rpartition(".")[2], module) for name, module in made.thinker.named_modules())
    return {name: module for name, module in named if name in ("visual", "audio_tower")}


def save(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes what `checkpoint.save` writes, and how images, videos and sounds are made."""
    checkpoint.save(folder, made, tokens)
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
