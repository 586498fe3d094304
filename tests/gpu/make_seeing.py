"""`make_seeing.py FOLDER SHAPE [SIDE [SECONDS [LAYERS]]]`: a model that sees or hears, of random
weights, and prompts.

SHAPE is qwen3-vl-4b; qwen3-vl-30b-a3b or qwen3-omni-30b-a3b (its thinker) with LAYERS of their
language model, four if left out; or tiny. Images have SIDE pixels a side (1024 if left out), which
is a token of every 32 x 32; sounds last a second. With SECONDS, images become videos of 1,280 x 720
that last so long, 30 frames a second. The tokenizers are the tiny ones: their ids are the first of
the vocabulary, which is all that prompts need.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from relax_hpc.cli.demo import models, tasks
from relax_hpc.runtime.files.records import read_json, write_json

VOCAB = 151936
ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TEXT_4B = {
    "vocab_size": VOCAB, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rope_parameters": ROPE | {"rope_theta": 5e6},
    "tie_word_embeddings": True,
}  # fmt: skip
TOWER_4B = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2560,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
TEXT_30B = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
TEXT_VL_30B = TEXT_30B | {
    "num_local_experts": 128,
    "vocab_size": VOCAB, "intermediate_size": 6144, "max_position_embeddings": 262144,
    "rope_parameters": ROPE | {"rope_theta": 5e6}, "tie_word_embeddings": False,
}  # fmt: skip
TEXT_OMNI = TEXT_30B | {
    "vocab_size": 152064, "intermediate_size": 768, "max_position_embeddings": 65536,
    "rope_parameters": ROPE | {"rope_theta": 1e6},
}  # fmt: skip
TOWER_30B = TOWER_4B | {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 2048,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
EARS_OMNI = {
    "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "output_dim": 2048, "downsample_hidden_size": 480, "n_window": 50,
    "n_window_infer": 800,
}  # fmt: skip
LARGEST = 16384 * 32 * 32
"""Pixels of an image at most; job files bound it further."""


def vl_4b(tokens: Any) -> Any:
    tiny = models.seeing_model("vl", tokens, seed=0).config.to_dict()
    tiny["text_config"] |= TEXT_4B
    tiny["vision_config"] |= TOWER_4B
    config = Qwen3VLConfig(**tiny)
    return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)


def vl_30b(tokens: Any, layers: int) -> Any:
    tiny = models.seeing_model("vl-moe", tokens, seed=0).config.to_dict()
    tiny["text_config"] |= TEXT_VL_30B | {"num_hidden_layers": layers}
    tiny["vision_config"] |= TOWER_30B
    config = Qwen3VLMoeConfig(**(tiny | {"tie_word_embeddings": False}))
    return Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)


def omni(tokens: Any, layers: int) -> Any:
    config = models.hearing_model(tokens, seed=0).config
    made = config.to_dict()
    thinker = made["thinker_config"]
    thinker["text_config"] |= TEXT_OMNI | {"num_hidden_layers": layers}
    thinker["vision_config"] |= TOWER_30B
    thinker["audio_config"] |= EARS_OMNI
    made["talker_config"]["thinker_hidden_size"] = TEXT_OMNI["hidden_size"]
    return Qwen3OmniMoeForConditionalGeneration._from_config(
        type(config)(**made), dtype=torch.bfloat16
    )


folder, shape = Path(sys.argv[1]), sys.argv[2]
side = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
seconds = int(sys.argv[4]) if len(sys.argv) > 4 else 0
layers = int(sys.argv[5]) if len(sys.argv) > 5 else 4
hears = "omni" in shape
tokens = (models.hearing_tokenizer if hears else models.seeing_tokenizer)()
torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    if shape == "tiny":
        made = models.seeing_model("vl", tokens, seed=0)
    elif hears:
        made = omni(tokens, layers)
    else:
        made = vl_30b(tokens, layers) if "30b" in shape else vl_4b(tokens)
folder.mkdir(parents=True, exist_ok=True)
(tasks.write_tones if hears else tasks.write_shapes)(folder, 96, 16, 0)


def enlarge(file: Path) -> None:
    drawn = Image.open(file).resize((side, side), Image.Resampling.BILINEAR)
    grain = Image.effect_noise((side, side), 40).convert("RGB")  # what a photo has, and PNG keeps
    Image.blend(drawn, grain, 0.2).save(file, compress_level=1)


def film(file: Path) -> None:
    """The image, moving on by a few pixels a frame, with one of eight grains in each."""
    import av
    import numpy as np

    drawn = np.asarray(Image.open(file).resize((1280, 720), Image.Resampling.BILINEAR))
    random = np.random.default_rng(int(re.sub(r"\D", "", file.stem)))
    grains = random.integers(0, 12, (8, *drawn.shape), np.uint8)
    with av.open(str(file.with_suffix(".mp4")), "w") as container:
        how = {"preset": "ultrafast", "crf": "20"}
        stream = container.add_stream("libx264", rate=30, options=how)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for number in range(30 * seconds):
            moved = np.roll(drawn // 2, (3 * number, 5 * number), (0, 1)) + grains[number % 8]
            frame = av.VideoFrame.from_ndarray(moved, format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    file.unlink()


with ThreadPoolExecutor(16) as threads:
    list(threads.map(film if seconds else enlarge, (folder / "images").iterdir()))
if seconds:
    for file in folder.glob("*.jsonl"):
        text = file.read_text().replace("<image>", "<video>").replace('"images":', '"videos":')
        file.write_text(text.replace(".png", ".mp4"))
(models.save_hearing if hears else models.save_seeing)(folder / "model", made, tokens)
file = folder / "model" / "preprocessor_config.json"
bounds = {"min_pixels": 64 * 64, "max_pixels": LARGEST}
size = {"size": {"shortest_edge": 64 * 64, "longest_edge": LARGEST}}
write_json(file, read_json(file) | (bounds if hears else size))
