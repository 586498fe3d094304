"""Makes tiny checkpoints offline: Qwen3, Qwen3-VL (dense or with experts) and Qwen3-Omni.

Each has everything its full-size model has, but smaller, and fits one CPU core. `AutoTokenizer`,
`AutoModelForCausalLM`, SGLang and the Megatron loader read it like any other Hugging Face folder.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from relax_hpc.cli.demo import tasks
from relax_hpc.runtime.files.records import write_json
from relax_hpc.trainer.models.hf_files import SINGLE

END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["\\boxed{", "user\n", "assistant\n"]
"""Frequent here, so one token each: an addition prompt has 12 tokens instead of 23."""

VOCAB_SIZE = 320
"""256 bytes, 3 special tokens, 3 words; padded to a multiple of 64 to split over ranks."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer(
    *,
    special: Sequence[str] = SPECIAL,
    words: Sequence[str] = WORDS,
    chat_template: str = CHAT_TEMPLATE,
    named: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Makes a byte-level tokenizer without merges: every string round-trips, nothing is unknown.

    Args:
        special: special tokens, those of `SPECIAL` first.
        words: frequent texts that are one token each.
        chat_template: goes into its folder.
        named: special tokens by the names that a processor uses.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    backend.add_tokens([AddedToken(w, normalized=False, special=False) for w in words])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )
    made.chat_template = chat_template
    return made


def model(tokens: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Makes a Qwen3 of 0.6 million parameters with random float32 weights drawn from `seed`."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def save(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes config.json, safetensors, the tokenizer and its template, generation_config.json."""
    made.generation_config.eos_token_id = [tokens.eos_token_id]
    made.generation_config.pad_token_id = tokens.pad_token_id
    transformers_logging.disable_progress_bar()  # one file, in no time
    made.save_pretrained(folder)
    made.generation_config.save_pretrained(folder)
    tokens.save_pretrained(folder)


Kind = Literal["vl", "vl-moe"]
MediaKind = Kind | Literal["omni"]

VISION_START, VISION_END, IMAGE, VIDEO = _SEEN = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
AUDIO_START, AUDIO_END, AUDIO = _HEARD = "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"
_IDS = (
    "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id",
    "audio_start_token_id", "audio_end_token_id", "audio_token_id",
)  # fmt: skip
"""Names in config.json of the ids of these tokens, in the same order."""
_ASKED = (
    "vision_bos_token", "vision_eos_token", "image_token", "video_token",
    "audio_bos_token", "audio_eos_token", "audio_token",
)  # fmt: skip
"""Names of these tokens in the tokenizer of transformers' processor."""
SEEING_TEMPLATE = (
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
    "vocab_size": VOCAB_SIZE,
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


def seeing_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny text model's, with tokens of images and videos; a colour is one token."""
    return tokenizer(
        special=[*SPECIAL, *_SEEN],
        words=[*WORDS, tasks.SHAPE_QUESTION, *tasks.COLOURS],
        chat_template=SEEING_TEMPLATE,
    )


def seeing_model(kind: Kind, tokens: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Makes a Qwen3-VL with random float32 weights drawn from `seed`."""
    ids: dict[str, Any] = dict(zip(_IDS, tokens.convert_tokens_to_ids([*_SEEN]), strict=False))
    text = TEXT | {"pad_token_id": tokens.pad_token_id, "tie_word_embeddings": kind == "vl"}
    kinds: tuple[type[PreTrainedConfig], type[PreTrainedModel]]
    kinds = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    if kind == "vl-moe":
        kinds, text = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration), text | EXPERTS
    config = kinds[0](
        text_config=text, vision_config=VISION, tie_word_embeddings=kind == "vl", **ids
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kinds[1](config).float().eval()


def save_seeing(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes what `save` writes, and the image and video processors."""
    save(folder, made, tokens)
    _transpose_experts(folder / SINGLE)
    write_json(folder / "preprocessor_config.json", _IMAGES)
    write_json(folder / "video_preprocessor_config.json", _VIDEOS)


def _transpose_experts(file: Path) -> None:
    """Transposes experts to the hub's layout; transformers saves its own."""
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


HEARING_TEMPLATE = SEEING_TEMPLATE.replace(
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
_PREPROCESSOR = PATCHES | {
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


def hearing_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny vision model, with tokens of sounds; a pitch is one token."""
    return tokenizer(
        special=[*SPECIAL, *_SEEN, *_HEARD],
        words=[
            *WORDS, tasks.SHAPE_QUESTION, *tasks.COLOURS, tasks.TONE_QUESTION, *tasks.PITCHES,
        ],
        chat_template=HEARING_TEMPLATE,
        named=dict(zip(_ASKED, [*_SEEN, *_HEARD], strict=True)),
    )  # fmt: skip


def hearing_model(tokens: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Makes a Qwen3-Omni with random float32 weights drawn from `seed`."""
    named = zip(_IDS, tokens.convert_tokens_to_ids([*_SEEN, *_HEARD]), strict=True)
    ids: dict[str, Any] = dict(named)
    text = TEXT | EXPERTS
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text
            | {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id},
            "vision_config": VISION,
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
    """Returns the thinker's encoders by name; their place differs between versions of
    transformers."""
    named = ((name.rpartition(".")[2], module) for name, module in made.thinker.named_modules())
    return {name: module for name, module in named if name in ("visual", "audio_tower")}


def save_hearing(folder: Path, made: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    """Writes what `save` writes, and the image, video and audio processors."""
    save(folder, made, tokens)
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)


def make_media_model(
    kind: MediaKind, seed: int
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel, Callable[..., None]]:
    """Makes a tokenizer, a model of random weights, and gives the function that saves both."""
    if kind == "omni":
        tokens = hearing_tokenizer()
        return tokens, hearing_model(tokens, seed=seed), save_hearing
    tokens = seeing_tokenizer()
    return tokens, seeing_model(kind, tokens, seed=seed), save_seeing
