"""Rows with images, videos and sounds, their arrays, and what Hugging Face makes of them.

A medium's array is drawn from the number that its digest is.
"""

import copy
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from megatron_reference import hub_layout, updated
from torch.overrides import TorchFunctionMode
from trainers import num_tokens

from relax_hpc.cli.demo import models
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.extent import Extent, audio_tokens, interleave
from relax_hpc.data.media.kinds import modality_of
from relax_hpc.data.media.patches import patches, table
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.schema import FinishReason, MediaKind, Medium, Trajectory

START, END, IMAGE, VIDEO, AUDIO_START, AUDIO_END, AUDIO = range(259, 266)
"""Ids of the tiny models' tokens."""


def make(folder, *, kind="vl", seed=0, deeper=False):
    """A tiny model that sees, with weights that matter: those of the demo are small.

    Of "omni" the thinker is given back. A deeper one has 8 layers, and features in 2 of them.
    """
    if deeper:
        with (
            patch.dict(models.TEXT, num_hidden_layers=8),
            patch.dict(models.VISION, deepstack_visual_indexes=[0, 1]),
        ):
            return make(folder, kind=kind, seed=seed)
    tokens, whole, save = models.make_media_model(kind, seed)
    model = whole.thinker if kind == "omni" else whole
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(1 if "audio_tower" in name else 3)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    save(folder, whole, tokens)
    return model


def pixels_of(medium):
    """Canonical array of a medium: [frames, height, width, 3] uint8, or [128, frames] of sound."""
    if modality_of(medium) == "audio":
        number = int.from_bytes(medium.canonical_xxh3, "little")
        return np.random.default_rng(number).normal(size=(128, number // 1000)).astype(np.float32)
    time, height, width = medium.grid_thw
    frames = 1 if medium.kind is MediaKind.PNG else 2 * time
    rng = np.random.default_rng(int.from_bytes(medium.canonical_xxh3, "little"))
    return rng.integers(0, 256, (frames, 16 * height, 16 * width, 3)).astype(np.uint8)


def image(number, height, width):
    return _medium(MediaKind.PNG, number, (1, height, width))


def video(number, time, height, width):
    return _medium(MediaKind.MP4, number, (time, height, width))


def film(number, time, height, width, seconds=0.77):
    """A video of Qwen3-Omni, which is written in one piece, and timed."""
    made = video(number, time, height, width)
    return made._replace(frames=tuple(range(2 * time)), seconds_per_grid=seconds)


def sound(number, frames):
    return _medium(MediaKind.WAV, 1000 * frames + number, (0, 0, 0))


def sound_of_video(number, frames):
    """The sound of a video, which is written with it: see `row`."""
    return sound(number, frames)._replace(kind=MediaKind.MP4)


def _medium(kind, number, grid):
    digest = number.to_bytes(16, "little")
    return Medium(kind, np.empty(0, np.uint8), grid, digest)


def _written(medium):
    """Tokens of the stretches of a medium, its token, and those around it."""
    if modality_of(medium) == "audio":
        frames = int.from_bytes(medium.canonical_xxh3, "little") // 1000
        return [audio_tokens(frames, 100)], AUDIO, AUDIO_START, AUDIO_END
    time, height, width = medium.grid_thw
    if medium.kind is MediaKind.PNG:
        return [height * width // 4], IMAGE, START, END
    if medium.seconds_per_grid:
        return [time * height * width // 4], VIDEO, START, END
    return [height * width // 4] * time, VIDEO, START, END


def row(guid, media, *, sibling=0, response=6, seed=None):
    """Text, then each medium with text behind it, then a response; siblings differ by it.

    A medium may be a pair: a video and its sound.
    """
    rng = np.random.default_rng([guid, 7 if seed is None else seed])
    ids, spans = rng.integers(0, 250, 3).tolist(), []
    flat = [each for medium in media for each in (medium if _is_pair(medium) else (medium,))]
    number = -1
    for medium in media:
        number += 1
        if _is_pair(medium):
            ids += [*rng.integers(0, 250, 2).tolist(), START, AUDIO_START]
            _add_pair(ids, spans, number, *medium)
            ids += [AUDIO_END, END]
            number += 1
            continue
        stretches, token, start, end = _written(medium)
        for count in stretches:
            ids += [*rng.integers(0, 250, 2).tolist(), start]
            spans.append((number, len(ids), count))
            ids += [token] * count + [end]
    ids += rng.integers(0, 250, 2).tolist()
    prompt = len(ids)
    ids += np.random.default_rng([guid, sibling, 1]).integers(0, 250, response).tolist()
    mask = np.zeros(len(ids), np.uint8)
    mask[prompt:] = 1
    return Trajectory(
        guid=guid, sibling=sibling, prompt_index=guid, seed=0,
        token_ids=np.array(ids, np.int32), prompt_len=prompt, loss_mask=mask,
        columns={"rollout_logprobs": np.where(mask, -3.0, 0).astype(np.float32)},
        version_runs=np.array([[prompt, 0]], np.int32), finish=FinishReason.STOP, reward=0.0,
        media=tuple(flat), media_spans=np.array(spans, np.int32).reshape(-1, 3),
    )  # fmt: skip


def _is_pair(medium):
    return not isinstance(medium, Medium)


def _add_pair(ids, spans, number, video, heard):
    grid, [total] = video.grid_thw, _written(heard)[0]
    seen = Extent(
        "video", (np.prod(grid) // 4,), grid=grid, seconds_per_grid=video.seconds_per_grid
    )
    turns = [iter(each.tokens) for each in interleave(seen, Extent("audio", (total,)), 13.0)]
    place = 0
    while count := next(turns[place], 0):
        spans.append((number + place, len(ids), count))
        ids += [(VIDEO, AUDIO)[place]] * count
        place = 1 - place


def mixed_rows():
    """Text, an image that rows of two groups see, two images, a video, both; and advantages."""
    first, second, film = image(1, 4, 6), image(2, 8, 4), video(3, 3, 4, 4)
    rows = [
        row(0, []), row(1, [first]), row(1, [first], sibling=1, response=9), row(2, [], response=3),
        row(3, [second, first]), row(4, [film]), row(5, [image(5, 4, 4), film, second]),
        row(6, [image(6, 6, 4)], response=2),
    ]  # fmt: skip
    return rows, np.random.default_rng(0).normal(size=len(rows)).astype(np.float32)


def rows_of_one(medium):
    """A row with a medium, the others text: with a budget of 90 tokens, a rank has micro-batches
    of text alone before and behind it; of two ranks that share the rows, one has no medium."""
    lengths = (35, 35, 50, 45)  # beside 5 tokens of a prompt
    rows = [row(0, [medium])]
    rows += [row(guid, [], response=length) for guid, length in enumerate(lengths, 1)]
    return rows, np.random.default_rng(1).normal(size=len(rows)).astype(np.float32)


def mixed_rows_heard():
    """The same with sounds, among them one shorter than a chunk, and videos that are timed, two of
    them with their sound; one of these is seen elsewhere without it."""
    first, second, seen = image(1, 4, 6), image(2, 8, 4), film(3, 3, 4, 4)
    short, long, longer = sound(4, 37), sound(5, 230), sound(6, 451)
    heard, brief = sound_of_video(8, 210), sound_of_video(10, 55)
    rows = [
        row(0, []), row(1, [short]), row(1, [short], sibling=1, response=9), row(2, [first]),
        row(3, [long, first]), row(4, [seen]), row(5, [second, longer, seen, long]),
        row(6, [longer], response=2),
        row(7, [first, (seen, heard), long, (film(7, 2, 4, 6), sound_of_video(9, 120))]),
        row(8, [(seen, brief)]),
    ]  # fmt: skip
    return rows, np.random.default_rng(0).normal(size=len(rows)).astype(np.float32)


def _heard_inputs(row):
    """Arguments of Hugging Face's thinker that its other models do not take."""
    found = {"attention_mask": torch.ones(1, len(row.token_ids), dtype=torch.long)}
    films = [medium for medium in row.media if modality_of(medium) == "video"]
    if films:
        found["video_second_per_grid"] = torch.tensor([each.seconds_per_grid for each in films])
    heard = [medium for medium in row.media if modality_of(medium) == "audio"]
    found["use_audio_in_video"] = any(each.kind is MediaKind.MP4 for each in heard)
    mels = [pixels_of(medium) for medium in heard]
    if mels:
        lengths = torch.tensor([[mel.shape[1]] for mel in mels])
        found["input_features"] = torch.zeros(len(mels), 128, int(lengths.max()))
        for place, mel in zip(found["input_features"], mels, strict=True):
            place[:, : mel.shape[1]] = torch.from_numpy(mel)
        found["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths).long()
    return found


def inputs_of(row, folder):
    """Arguments of Hugging Face's model for a row, batch of one."""
    recipe = read_recipe(folder, MediaConfig())
    kinds = np.zeros(len(row.token_ids), np.int64)
    for medium, first, tokens in row.media_spans.tolist():
        is_video = modality_of(row.media[medium]) == "video"
        kinds[first : first + tokens] = 2 if is_video else 1
    given = {"input_ids": torch.from_numpy(row.token_ids.astype(np.int64))[None]}
    if recipe.audio:
        given |= _heard_inputs(row)
    elif row.media:
        given["mm_token_type_ids"] = torch.from_numpy(kinds)[None]
    for wanted, name, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        found = [medium for medium in row.media if modality_of(medium) == wanted]
        if found:
            vision = recipe.image if wanted == "image" else recipe.video.vision
            arrays = [torch.from_numpy(pixels_of(medium)) for medium in found]
            given[name] = torch.cat([patches(each, vision, torch.float32) for each in arrays])
            given[grids] = torch.tensor([medium.grid_thw for medium in found])
    return given


def logprobs_of(model, row, folder):
    """[tokens] nats by Hugging Face, 0 for the first."""
    given = inputs_of(row, folder)
    if "attention_mask" in given:  # positions as SGLang looks them up, without what is fractional
        given["position_ids"] = _positions(model, given).floor()
    dtype = next(model.parameters()).dtype
    for name in ("pixel_values", "pixel_values_videos", "input_features"):
        given |= {name: given[name].to(dtype)} if name in given else {}
    values = model(**given).logits[0].log_softmax(-1)[:-1]
    ids = given["input_ids"][0, 1:, None]
    return torch.cat([torch.zeros(1), values.gather(1, ids)[:, 0]])


def _positions(model, given):
    index = getattr(model.model, "get_rope_index", None) or model.get_rope_index
    mask = given.get("feature_attention_mask")
    found, _ = index(
        given["input_ids"], given.get("image_grid_thw"), given.get("video_grid_thw"),
        given["attention_mask"], given["use_audio_in_video"],
        None if mask is None else mask.sum(-1), given.get("video_second_per_grid"),
    )  # fmt: skip
    return found


def _hub_layout(model, tensors):
    """Numpy copies under the names of the hub."""
    if any("audio_tower" in name for name, _ in model.named_modules()):
        tensors = {_of_thinker(name): tensor for name, tensor in tensors.items()}
    return hub_layout(tensors)


def _of_thinker(name):
    """The hub's name of a parameter; transformers from 5.23 on has the parts in its `model`."""
    for part in ("audio_tower.", "visual."):
        name = name.removeprefix("model.") if name.startswith(f"model.{part}") else name
    return "thinker." + name.replace("model.language_model.", "model.")


def tokens_of(rows):
    """Tokens of all rows that stand for features, by modality."""
    found = Counter()
    for row in rows:
        for medium, _, tokens in row.media_spans.tolist():
            found[f"{modality_of(row.media[medium])}_tokens"] += tokens
    return dict(found)


def counted(costs):
    """What the costs of a step say of media."""
    return {k.removeprefix("train/media/"): v for k, v in costs.items() if "/media/" in k}


class _Double(TorchFunctionMode):
    """transformers computes norms, routes and softmax in float32, whatever a model is in."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            if function is torch.Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def exact(model, rows, advantages, folder):
    """Logprobs and gradients of the mean loss in float64; only the angles of positions are not."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    table.cache_clear()
    with _Double():
        values = [logprobs_of(model, each, folder) for each in rows]
        sampled = (
            v[torch.from_numpy(r.loss_mask) > 0].sum() for v, r in zip(values, rows, strict=True)
        )
        loss = -sum(float(a) * each for a, each in zip(advantages, sampled, strict=True))
        (loss / num_tokens(rows)).backward()
    table.cache_clear()  # it is in float64 now
    gradients = _hub_layout(model, {n: p.grad for n, p in model.named_parameters()})
    return SimpleNamespace(logprobs=[v.detach().numpy() for v in values], gradients=gradients)


def reference(folder, model, rows, advantages, num_steps=2):
    """What becomes of a batch with media; see `updated`."""
    known = {"folder": folder, "exact": exact(model, rows, advantages, folder)}
    return updated(
        model, rows, advantages, lambda row: logprobs_of(model, row, folder),
        lambda tensors: _hub_layout(model, tensors), num_steps, **known,
    )  # fmt: skip
