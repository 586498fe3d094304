"""`make_media.py FOLDER SHAPE [PROMPTS [SIDE [LAYERS]]]`: a model that sees, and prompts for it.

SHAPE: qwen3-vl-4b, qwen3-omni (the thinker of Qwen3-Omni-30B-A3B), or tiny-vl, tiny-omni. Weights
are random, LAYERS of the language model as many as are said. Tokenizer and preprocessor are the
tiny model's, the bounds of images those of the job. Every prompt shows an image of SIDE x SIDE
pixels, and of a model that hears a sound of 6 s, too.
"""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from relax_hpc.demo import hearing, seeing
from relax_hpc.models import registry

TEXT = {
    "vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {"num_heads": 16, "num_position_embeddings": 2304}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-4b": (
        TEXT | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                "num_key_value_heads": 8},
        VISION | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                  "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]},
        {},
    ),
    "qwen3-omni": (
        TEXT | {"hidden_size": 2048, "intermediate_size": 768, "moe_intermediate_size": 768,
                "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
                "num_key_value_heads": 4, "vocab_size": 152064},
        VISION | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
                  "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]},
        {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
         "encoder_ffn_dim": 5120, "output_dim": 2048, "downsample_hidden_size": 480,
         "n_window_infer": 800},
    ),
    "tiny-vl": ({}, {}, {}),
    "tiny-omni": ({}, {}, {}),
}  # fmt: skip
"""What of text_config, vision_config and audio_config is not as in the tiny model."""
NORMS = ("norm", "ln_q", "ln_post")
RATE, SOUND_S = 16000, 6


def make_model(folder: Path, name: str, layers: int | None) -> None:
    """Writes all files of a model."""
    text, vision, audio = SHAPES[name]
    tiny = hearing if "omni" in name else seeing
    tokens = tiny.tokenizer()
    drawn = hearing.model(tokens, seed=0) if "omni" in name else seeing.model("vl", tokens, seed=0)
    tiny.save(folder, drawn, tokens)
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    thinker = whole.get("thinker_config", whole)
    if text:
        for of_the_tiny_one in ("layer_types", "num_local_experts"):
            thinker["text_config"].pop(of_the_tiny_one, None)
    thinker["text_config"] |= text | ({"num_hidden_layers": layers} if layers else {})
    thinker["vision_config"] |= vision
    if audio:
        thinker["audio_config"] |= audio
    file.write_text(json.dumps(whole))
    save_file(weights(folder), folder / "model.safetensors", metadata={"format": "pt"})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Draws the tensors of the shape in a folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def tensor(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(size, dtype=dtype)
        if len(size) == 1 or any(part in name for part in NORMS):
            return torch.ones(size, dtype=dtype)
        spread = 0.02 if len(size) == 2 else 1 / math.sqrt(math.prod(size[1:]))
        return (torch.randn(size, device=device, dtype=torch.float32) * spread).to(dtype).cpu()

    made = {}
    for parameter in registry.parameters(registry.read_architecture(folder)):
        assert not parameter.transposed, "no shape here has fused experts"
        sizes = list(parameter.hf.values()) * (parameter.num_experts or 1)
        for name, size in zip(parameter.names(), sizes, strict=True):
            made[name] = tensor(name, size)
    return made


def make_prompts(folder: Path, file: str, count: int, side: int, *, hears: bool) -> None:
    """Writes the lines of a file and their media; no two are alike."""
    import soundfile

    lines = []
    for number in range(count):
        rng = np.random.default_rng([number, len(file)])
        image, sound = f"images/{file}-{number}.jpg", f"sounds/{file}-{number}.wav"
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        (folder / image).write_bytes(photo(rng, side))
        row: dict[str, Any] = {"images": [image], "answer": "1"}
        row["prompt"] = f"<image>{'<audio>' if hears else ''}colour?"
        if hears:
            (folder / sound).parent.mkdir(parents=True, exist_ok=True)
            wave = 0.3 * np.sin(np.arange(RATE * SOUND_S) * rng.uniform(0.05, 0.5))
            soundfile.write(folder / sound, wave + rng.normal(0, 0.02, len(wave)), RATE)
            row["audios"] = [sound]
        lines.append(json.dumps(row) + "\n")
    (folder / f"{file}.jsonl").write_text("".join(lines))


def photo(rng: np.random.Generator, side: int) -> bytes:
    """A JPEG of soft shapes with the grain of a camera."""
    soft = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8)).resize((side, side), 3)
    grain = rng.normal(0, 6, (side, side, 1)).astype(np.float32)
    pixels = np.clip(np.asarray(soft, np.float32) + grain, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", quality=90)
    return file.getvalue()


if __name__ == "__main__":
    where, shape, *numbers = sys.argv[1:]
    prompts, side, layers = (*map(int, numbers), *(64, 1024, 0)[len(numbers) :])
    make_model(Path(where) / "model", shape, layers or None)
    for file, count in (("train", prompts), ("heldout", 2)):
        make_prompts(Path(where), file, count, side, hears="omni" in shape)
