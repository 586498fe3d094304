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

import torch
from PIL import Image
from transformers import AutoConfig

from relax_hpc.cli.demo import models, tasks

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from media_shapes import SHAPES, model_folder

folder, shape = Path(sys.argv[1]), sys.argv[2]
side = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
seconds = int(sys.argv[4]) if len(sys.argv) > 4 else 0
layers = int(sys.argv[5]) if len(sys.argv) > 5 else 4
kind = SHAPES[shape][0]
hears = kind == "omni"
model_folder(shape, folder / "model", **({"num_hidden_layers": layers} if "30b" in shape else {}))
config = AutoConfig.from_pretrained(folder / "model")
if hears:
    config.talker_config.thinker_hidden_size = config.thinker_config.text_config.hidden_size
tokens, tiny, save = models.make_media_model(kind, 0)
torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    made = type(tiny)._from_config(
        config, dtype=torch.float32 if shape == "tiny" else torch.bfloat16
    )
preprocessor = folder / "model" / "preprocessor_config.json"
bounds = preprocessor.read_text()
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
save(folder / "model", made, tokens)
preprocessor.write_text(bounds)
