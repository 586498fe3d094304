"""Images, clips and sounds made in memory, and transformers' own code as the reference."""

import ast
import asyncio
import io
import itertools
import json
import math
import struct
from functools import cache
from pathlib import Path

import numpy as np

from relax_hpc.cli.demo import models
from relax_hpc.config.prompts import MediaConfig, PromptsConfig
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.data.media_tokens import MediaTokens
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource

VISION = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
          "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
FOLDERS = {
    "qwen3_vl": {
        "config.json": {"model_type": "qwen3_vl"},
        "preprocessor_config.json": VISION
        | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        "video_preprocessor_config.json": VISION
        | {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 2},
    },
    "qwen3_omni_moe": {
        "config.json": {
            "model_type": "qwen3_omni_moe",
            "thinker_config": {"position_id_per_seconds": 13, "audio_config": {"n_window": 50}},
        },
        "preprocessor_config.json": VISION
        | {"min_pixels": 3136, "max_pixels": 12845056, "chunk_length": 300, "feature_size": 128},
    },
}
"""The files of the published models, as far as they are read."""
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
           "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]  # fmt: skip
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if c.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif c.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif c.type == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- else %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def model_folder(path, model_type):
    """Writes the files of a model that say how its media are made."""
    path.mkdir(exist_ok=True)
    for name, record in FOLDERS[model_type].items():
        (path / name).write_text(json.dumps(record))
    return path


def recipe_of(path, model_type, **settings):
    return read_recipe(model_folder(path / model_type, model_type), MediaConfig(**settings))


def tokenizer():
    made = models.tokenizer()
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = TEMPLATE
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_of(file, folder, tokens, **settings):
    """The prompts of a file, as a model in this folder takes them."""
    config = PromptsConfig(train=file, **settings)
    recipe = read_recipe(folder, config.media)
    media = MediaTokens(recipe, tokens) if recipe else None
    records = Records(config.mixture, config)
    return PromptSource(records, tokens, shuffle_seed=None, settings=config, media=media)


def source(data, modality="image"):
    return MediaSource(f"x.jsonl, line 3: {modality} 1", modality, data=data)


def seen(data, recipe, modality="image"):
    """What a policy is shown of these bytes."""
    return canonical(measure_medium(source(data, modality), recipe), recipe)


def prepared(recipe, media, spool=None, store="source", spans=(), decoders=None):
    """What workers make of measured media: as it is prepared, and the arrays for the engine."""

    async def run():
        async with (
            MediaWorkers(recipe, decoders or Decoders(1), spool, store) as workers,
            workers.prepare(media, spans) as made,
        ):
            return made, [np.load(each.path) for each in made.view.media]

    return asyncio.run(run())


def pixels(height, width, seed=0, channels=3):
    """Shapes and noise, so that no two places are alike."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [127 + 80 * np.sin(x / 7 + c) * np.cos(y / 11 - c) for c in range(channels)]
    noisy = np.stack(waves, -1) + random.normal(0, 12, (height, width, channels))
    return noisy.clip(0, 255).astype(np.uint8)


def encoded(image, form="PNG", **options):
    made = io.BytesIO()
    image.save(made, form, **options)
    return made.getvalue()


def photo(height=60, width=100, form="PNG", seed=0, **options):
    from PIL import Image

    return encoded(Image.fromarray(pixels(height, width, seed)), form, **options)


def clip(times, height=48, width=64, form="mp4", rate=10, turned=0):
    """A video whose frame n is shown at times[n] (in frames) and is grey of 20 n + 20."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format=form) as container:
        stream = container.add_stream("libx264" if form == "mp4" else "libvpx-vp9", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for number, time in enumerate(times):
            grey = np.full((height, width, 3), 20 + 20 * (number % 11), np.uint8)
            grey[: height // 4, : width // 4] = 255  # upper left, so that a turn is seen
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return made.getvalue()


def cut(data, begin_s, end_s):
    """An MP4 as `ffmpeg -c copy` cuts it: all frames are there, and a list says which are shown."""
    import av

    with av.open(io.BytesIO(data)) as container:
        per_s = int(1 / container.streams.video[0].time_base)
    made, at = bytearray(data), data.index(b"elst") + 12  # length in ms, then the first one shown
    begin = int.from_bytes(data[at + 4 : at + 8], "big") + round(begin_s * per_s)
    made[at : at + 8] = struct.pack(">Ii", round(1000 * (end_s - begin_s)), begin)
    return bytes(made)


def film(seconds=2.0, rate=10, heard_s=None, channels=1, later_s=0.0, form="mp4"):
    """A video with a tone of 440 Hz as long as `heard_s`, which begins `later_s` after it."""
    import av

    made, sampling = io.BytesIO(), 48000 if form == "webm" else 16000
    t = np.arange(int((seconds if heard_s is None else heard_s) * sampling)) / sampling
    wave = np.tile(0.3 * np.sin(2 * np.pi * 440 * t), (channels, 1)).astype(np.float32)
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[channels]
    with av.open(made, "w", format=form) as container:
        shown = container.add_stream("libx264" if form == "mp4" else "libvpx-vp9", rate=rate)
        shown.width, shown.height, shown.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream("aac" if form == "mp4" else "libopus", rate=sampling)
        heard.layout = layout
        for number in range(int(seconds * rate)):
            grey = np.full((48, 64, 3), 20 + 20 * (number % 11), np.uint8)
            container.mux(shown.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        resampler = av.AudioResampler(heard.format, layout, sampling, frame_size=960)
        block = av.AudioFrame.from_ndarray(wave, "fltp", layout)
        block.sample_rate, block.pts = sampling, int(later_s * sampling)
        for part in [*resampler.resample(block), *resampler.resample(None)]:
            container.mux(heard.encode(part))
        container.mux([*shown.encode(), *heard.encode()])
    return made.getvalue()


def tone(seconds=1.0, rate=16000, channels=1, form="WAV", loud=0.3):
    import soundfile

    t = np.arange(int(seconds * rate)) / rate
    wave = loud * np.sin(2 * np.pi * 440 * t)[:, None] * np.linspace(1, 0.5, channels)
    made = io.BytesIO()
    soundfile.write(made, wave, rate, format=form)
    return made.getvalue()


@cache
def of_transformers(module, *names):
    """Functions and methods of transformers, run as they are written.

    Their modules cannot be imported without torchvision, which these parts do not use.
    """
    import torch
    import transformers

    path = Path(transformers.__file__).parent / "models" / f"{module}.py"
    tree = ast.parse(path.read_text())
    found = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    for made in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        methods = (n for n in made.body if isinstance(n, ast.FunctionDef))
        found |= {f"{made.name}.{n.name}": n for n in methods}
    space = {"math": math, "np": np, "torch": torch, "itertools": itertools}
    for name, each in found.items():
        if name in names or name == "_get_feat_extract_output_lengths":
            each.decorator_list, each.returns = [], None
            for arg in ast.walk(each.args):
                if isinstance(arg, ast.arg):
                    arg.annotation = None
            exec(compile(ast.Module([each], []), str(path), "exec"), space)
    return [space[name.rpartition(".")[2]] for name in names]
