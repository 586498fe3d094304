"""Models that see or hear, as large as real ones but without weights; photos as large in a file."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax_hpc.cli.bench.shapes import users_folder
from relax_hpc.cli.demo import models
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.recipe import Recipe, read_recipe
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import read_json, write_json

_ROPE = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}  # fmt: skip
_TEXT = {
    "vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_parameters": _ROPE,
}  # fmt: skip
_MOE = _TEXT | {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}  # fmt: skip
_SEES = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "out_hidden_size": 2048, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_HEARS = {
    "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "output_dim": 2048, "downsample_hidden_size": 480, "n_window": 50,
    "n_window_infer": 800,
}  # fmt: skip
_PARTS = "text_config", "vision_config", "audio_config"
SHAPES: dict[str, tuple[models.MediaKind, *tuple[dict[str, Any], ...]]] = {
    "qwen3-vl-4b": ("vl",
        _TEXT | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_key_value_heads": 8},
        _SEES | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                 "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]}),
    "qwen3-vl-30b-a3b": ("vl-moe", _MOE, _SEES),
    "qwen3-omni-30b-a3b": ("omni",
        _MOE | {"intermediate_size": 768, "vocab_size": 152064, "max_position_embeddings": 65536,
                "rope_parameters": _ROPE | {"rope_theta": 1e6}},
        _SEES, _HEARS),
    "tiny": ("vl",),
}  # fmt: skip
"""Kind, and what config.json says of each part; `tiny` is for machines without a GPU."""
_PIXELS = 64 * 64, 16384 * 32 * 32
"""Of an image, at least and at most; job files bound it further."""


def model_folder(shape: str, folder: Path, **text: int) -> Path:
    """Returns the folder of a model: one of the user's, or written to `folder`.

    That has files, tokenizer and weights of the tiny model of its kind, but for sizes; `text` are
    further ones of its language model.
    """
    if found := users_folder(shape, SHAPES):
        return found
    kind, *sizes = SHAPES[shape]
    tokens, made, save = models.make_media_model(kind, 0)
    save(folder, made, tokens)
    config = read_json(folder / "config.json") or {}
    parts = config.get("thinker_config", config)
    for name, size in zip(_PARTS, sizes, strict=False):
        parts[name] |= size
    if sizes:
        for of_the_tiny_one in ("layer_types", "num_local_experts"):
            parts["text_config"].pop(of_the_tiny_one, None)
    parts["text_config"] |= text
    write_json(folder / "config.json", config)
    file, (least, most) = folder / "preprocessor_config.json", _PIXELS
    size = {"size": {"shortest_edge": least, "longest_edge": most}}
    bounds = {"min_pixels": least, "max_pixels": most} if kind == "omni" else size
    write_json(file, (read_json(file) or {}) | bounds)
    return folder


def recipe_of(folder: Path) -> Recipe:
    """Reads the rules of a model's preprocessor; raises ConfigError: it reads text only."""
    recipe = read_recipe(folder, MediaConfig())
    if recipe is None:
        raise ConfigError(f"--shape {folder}: the model reads text only; use one that sees")
    return recipe


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
