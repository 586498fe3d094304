"""A model that sees, its recipe, and what Hugging Face computes of the pixels it is shown."""

import asyncio
import contextlib

import av
import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen3OmniMoeThinkerForConditionalGeneration

from relax_hpc.cli.demo import models, tasks
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.canonical import canonical, measure_media
from relax_hpc.data.media.expand import expand, with_times
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.inference.generation import Draft, GenerationClient, Sampling

TOLERANCE = 2e-6  # nats, float32; another image of the same size is above 1e-2
TOGETHER = 1e-5  # of requests that run together: sums are made in an order that the batch decides
PAD = "<|vision_start|>{}<|vision_end|>"
IMAGE, VIDEO = PAD.format("<|image_pad|>"), PAD.format("<|video_pad|>")
AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"


def image(seed, height=64, width=96):
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


def source(folder, seed, **size):
    path = folder / f"{seed}.png"
    image(seed, **size).save(path)
    return MediaSource(f"image {seed}", "image", path=path)


def clip(folder, seed):
    frames = tuple(source(folder, seed + n) for n in range(4))
    return MediaSource(f"clip {seed}", "video", frames=frames, fps=2.0)


def film(folder, seed, seconds=2.0, rate=3, heard_s=2.0):
    """A video file of noise, with its sound; `rate` is of frames."""
    path = folder / f"{seed}.mp4"
    frames = [np.asarray(image(seed + n)) for n in range(int(seconds * rate))]
    wave = np.random.default_rng(seed).normal(0, 0.1, (1, int(heard_s * tasks.RATE)))
    with av.open(str(path), "w") as container:
        shown = container.add_stream("libx264", rate=rate)
        shown.height, shown.width, shown.pix_fmt = *frames[0].shape[:2], "yuv420p"
        heard = container.add_stream("aac", rate=tasks.RATE)
        for frame in frames:
            container.mux(shown.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        block = av.AudioFrame.from_ndarray(wave.astype(np.float32), "fltp", "mono")
        block.sample_rate = tasks.RATE
        container.mux(heard.encode(block))
        container.mux([*shown.encode(), *heard.encode()])
    return MediaSource(f"film {seed}", "video", path=path)


def sound(folder, seed, seconds=1.2):
    path = folder / f"{seed}.wav"
    wave = np.random.default_rng(seed).normal(0, 0.1, int(seconds * tasks.RATE))
    soundfile.write(path, wave, tasks.RATE)
    return MediaSource(f"sound {seed}", "audio", path=path)


SEEN = {
    "image": (IMAGE + "what?", lambda f: [source(f, 1)]),
    "2 images": (
        "is " + IMAGE + "as" + IMAGE + "?",
        lambda f: [source(f, 1), source(f, 2, height=128, width=64)],
    ),
    "video": (VIDEO + "what?", lambda f: [clip(f, 10)]),
    "image and video": (IMAGE + "in" + VIDEO + "?", lambda f: [source(f, 1), clip(f, 10)]),
}
HEARD = {
    "text": ("what is it?", lambda f: []),
    "sound": (AUDIO + "what?", lambda f: [sound(f, 1)]),
    "long sound": (AUDIO + "what?", lambda f: [sound(f, 2, 5.03)]),
    "image and sound": (IMAGE + "and" + AUDIO + "?", lambda f: [source(f, 1), sound(f, 1)]),
    "video and its sound": (VIDEO + "what?", lambda f: [film(f, 20)]),
    "sound that ends before": ("so" + VIDEO + "?", lambda f: [film(f, 21, rate=8, heard_s=0.3)]),
    "two of them": (
        VIDEO + "or" + AUDIO + "or" + VIDEO + IMAGE + "?",
        lambda f: [film(f, 22), sound(f, 1), film(f, 23, heard_s=3.1), source(f, 1)],
    ),
}


def make(folder, *, kind="vl", seed=5, like=None):
    """A tiny model whose answers depend on pixels.

    With `like` it is that one with another tower, that hears if it has one, or with other experts
    where it has some.
    """
    tokens, model, save = models.make_media_model(kind, seed)
    other = {"vl": "visual", "vl-moe": ".experts.", "omni": "audio_tower"}[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_other = other in name
            if parameter.ndim > 1 and "norm" not in name and "audio_tower" not in name:
                parameter.mul_(3.0)
            if like is not None and not is_other:
                parameter.copy_(like.get_parameter(name))
    save(folder, model, tokens)
    return model


class Seer:
    """The tiny model: its reference, its recipe, and its engine."""

    def __init__(self, folder):
        self.folder, self.tokens = folder, models.seeing_tokenizer()
        self.recipe = read_recipe(folder, MediaConfig())
        self.model = AutoModelForImageTextToText.from_pretrained(folder).float().eval()
        ids = self.tokens.convert_tokens_to_ids
        self.image, self.video = ids("<|image_pad|>"), ids("<|video_pad|>")
        self.placeholders = {self.image: "image", self.video: "video"}

    def prompt(self, text, *sources):
        """Token ids, media with their room, and spans."""
        media = measure_media(sources, self.recipe)
        extents = [each.extent for each in media]
        written = with_times(text, extents, self.recipe.family)
        ids = self.tokens.encode(written, add_special_tokens=False)
        found = expand(ids, extents, self.placeholders)
        return found.token_ids, media, found.spans

    def gap(self, prompt, made):
        """Nats by which a response's logprobs are away from Hugging Face's, token by token."""
        return (torch.tensor(made.logprobs) - self.logprobs(prompt, made.token_ids)).abs()

    def logprobs(self, prompt, response):
        """Hugging Face's, of a response in which placeholders are text, as any token is."""
        ids, media, spans = prompt
        return self.logprobs_of(ids, [canonical(m, self.recipe) for m in media], spans, response)

    def logprobs_of(self, ids, media, spans, response):
        """The same of media that are decoded, each of which is encoded by itself."""
        parts = {name.rpartition(".")[2]: module for name, module in self.model.named_modules()}
        language = parts.get("language_model", self.model.model)  # as it is until 5.22
        tokens = torch.tensor([[*ids, *response]])
        mask, deep = torch.zeros(1, tokens.shape[1], dtype=torch.bool), []
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(tokens)
            encoded, done = [self._encoded(medium, parts) for medium in media], [0] * len(media)
            for span in spans:
                features, levels = encoded[span.medium]
                begin = done[span.medium]
                end = done[span.medium] = begin + span.tokens
                place = slice(span.first, span.first + span.tokens)
                embeddings[0, place] = features[begin:end]
                if levels is not None:
                    mask[0, place] = True
                    deep.append([level[begin:end] for level in levels])
            assert done == [len(features) for features, _ in encoded]
            positions = self._positions(ids, [each.extent for each in media], spans)
            after = positions[..., -1].max() + 1 + torch.arange(len(response))
            positions = torch.cat([positions, after.expand(3, 1, -1)], -1)
            levels = [torch.cat(level) for level in zip(*deep, strict=True)]
            hidden = language(
                inputs_embeds=embeddings, position_ids=positions,
                visual_pos_masks=mask if deep else None,
                deepstack_visual_embeds=levels or None,
            ).last_hidden_state  # fmt: skip
            logits = self.model.lm_head(hidden)[0]
        found = logits[len(ids) - 1 : -1].log_softmax(-1)
        return found.gather(1, torch.tensor(response)[:, None])[:, 0]

    def _encoded(self, medium, parts):
        """Features, and those of further levels of what is seen."""
        array, kind = torch.tensor(medium.array), medium.extent.modality
        if kind == "audio":
            made = parts["audio_tower"](array, feature_lens=torch.tensor([array.shape[1]]))
            return made.last_hidden_state, None
        vision = self.recipe.image if kind == "image" else self.recipe.video.vision
        grid = torch.tensor([medium.extent.grid])
        made = parts["visual"](patches(array, vision, torch.float32), grid_thw=grid)
        return made.pooler_output, made.deepstack_features

    def _positions(self, ids, extents, spans):
        types = torch.zeros(1, len(ids), dtype=torch.int)
        for span in spans:
            is_video = extents[span.medium].modality == "video"
            types[0, span.first : span.first + span.tokens] = 2 if is_video else 1
        found, _ = self.model.model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=types, image_grid_thw=_of(extents, "image"),
            video_grid_thw=_of(extents, "video"), attention_mask=torch.ones(1, len(ids)),
        )  # fmt: skip
        return found


def _of(extents, modality, what="grid"):
    found = [getattr(each, what) for each in extents if each.modality == modality]
    return torch.tensor(found) if found else None


class Hearer(Seer):
    """The same of the tiny model that hears, too, also videos."""

    def __init__(self, folder):
        self.folder, self.tokens = folder, models.hearing_tokenizer()
        settings = {"advanced": {"audio_in_video": True}, "video_tokens_per_frame": (2, 24)}
        self.recipe = read_recipe(folder, MediaConfig(**settings))
        kind = Qwen3OmniMoeThinkerForConditionalGeneration
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        ids = self.tokens.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"])
        self.image, self.video, self.audio = ids
        self.placeholders = dict(zip(ids, ("image", "video", "audio"), strict=True))

    def _positions(self, ids, extents, spans):
        """Cut off, as SGLang does."""
        ids = torch.tensor([ids])
        index = getattr(self.model.model, "get_rope_index", None) or self.model.get_rope_index
        found, _ = index(
            ids, _of(extents, "image"), _of(extents, "video"), torch.ones_like(ids),
            any(each.is_of_video for each in extents), _of(extents, "audio", "mel_frames"),
            _of(extents, "video", "seconds_per_grid"),
        )  # fmt: skip
        return found.floor()


def ask(seer, prompts, new=12, draft=None, before=lambda view: view, **sampling):
    """Samples a response to each prompt, all at once; the media of each lie in the spool."""
    settings = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True} | sampling

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            workers = await stack.enter_async_context(MediaWorkers(seer.recipe, Decoders(1)))
            client = await stack.enter_async_context(
                GenerationClient(seer.process.url, seer.process.token)
            )
            asked = []
            for number, (ids, media, spans) in enumerate(prompts):
                made = await stack.enter_async_context(workers.prepare(media, spans))
                how = Sampling(**settings, view=before(made.view))
                given = None if draft is None else Draft(list(draft), [0.0] * len(draft), [])
                asked.append(client.sample(ids, number, how, draft=given))
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def assert_update_is_seen(seer, other, prompt):
    """A request after an update has logprobs of the `other` model's weights, and of no older ones.

    SGLang keeps a tower's features, and does not ask which weights made them.
    """
    [before] = ask(seer, [prompt])
    client = seer.process.client()
    try:
        client.update_weights_from_disk(str(other.folder), 1)
        [after] = ask(seer, [prompt])
        # In two parts, where the cache has the first: sums are made in another order.
        assert (gap := float(other.gap(prompt, after).max())) <= TOGETHER, gap
        old, new = (each.logprobs(prompt, after.token_ids) for each in (seer, other))
        assert (new - old).abs().max() > 1e-2
        assert before.version_runs == [(0, 0)] and after.version_runs == [(0, 1)]
    finally:
        client.update_weights_from_disk(str(seer.folder), 2)
        client.close()
