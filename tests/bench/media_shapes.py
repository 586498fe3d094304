"""Models that see, without weights, and photos that are drawn: as large as real ones in a file."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax_hpc.cli.bench.shapes import users_folder
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.recipe import Recipe, read_recipe
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import write_json

PLACEHOLDERS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *PLACEHOLDERS]
_FIRST_SPECIAL = 256
"""Number of tokens before: the bytes."""
_PATCHES = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
_IMAGES = _PATCHES | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
_VIDEOS = _PATCHES | {
    "video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 4, "max_frames": 768,
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
}  # fmt: skip


def _config(text: dict[str, Any], vision: dict[str, Any], sections: list[int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    ids = dict(zip(PLACEHOLDERS, range(_FIRST_SPECIAL + 3, _FIRST_SPECIAL + 7), strict=True))
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "text_config": text | {
            "model_type": "qwen3_vl_text", "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "attention_bias": False, "tie_word_embeddings": True, "eos_token_id": 258,
            "pad_token_id": 256, "rope_parameters": rope | {"mrope_interleaved": True},
        },
        "vision_config": vision | {
            "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
        },
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-4b": _config(
        {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "max_position_embeddings": 262144},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
         "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
        [24, 20, 20],
    ),
    "tiny": _config(
        {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160,
         "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 4096},
        {"depth": 4, "hidden_size": 48, "intermediate_size": 80, "num_heads": 2,
         "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]},
        [6, 5, 5],
    ),
}  # fmt: skip
"""config.json of what can be measured; `tiny` is for machines without a GPU."""


def model_folder(shape: str, folder: Path) -> Path:
    """Returns the folder of a model that sees: one of the user's, or written to `folder`."""
    if found := users_folder(shape, SHAPES):
        return found
    write_json(folder / "config.json", SHAPES[shape])
    write_json(folder / "preprocessor_config.json", _IMAGES)
    write_json(folder / "video_preprocessor_config.json", _VIDEOS)
    _write_tokenizer(folder)
    return folder


def recipe_of(folder: Path) -> Recipe:
    """Reads the rules of a model's preprocessor; raises ConfigError: it reads text only."""
    recipe = read_recipe(folder, MediaConfig())
    if recipe is None:
        raise ConfigError(f"--shape {folder}: the model reads text only; use one that sees")
    return recipe


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes with the tokens of media, whose ids are those of `SHAPES`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in _SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(folder)


Format = Literal["JPEG", "PNG"]
_COARSE, _GRAIN = 24, 2.5
"""Points of a side that colours are drawn at, and the noise of each pixel: 1 MP of these are 0.3 MB
of JPEG and 1.5 MB of PNG."""


def pixels(seed: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """[height, width, 3] smooth colours with the grain of a sensor; another seed, others."""
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (_COARSE, _COARSE, 3)).astype(np.uint8)
    smooth = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32
    )
    grain = random.standard_normal(smooth.shape, np.float32)
    return (smooth + _GRAIN * grain).clip(0, 255).astype(np.uint8)


def encoded(array: npt.NDArray[np.uint8], kind: Format) -> bytes:
    """Returns the file of an image, with Pillow's settings."""
    from PIL import Image

    file = io.BytesIO()
    if kind == "JPEG":
        Image.fromarray(array).save(file, kind, quality=95)
    else:
        Image.fromarray(array).save(file, kind)
    return file.getvalue()
