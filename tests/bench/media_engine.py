"""Requests with images to one SGLang: shown canonical pixels by a file, or fed PNG by HTTP.

Both ways ask for one token of every sibling of every image, all at once, in turns. Every turn has
images of its own, and prefixes are forgotten before it. Our way decodes the files of images within
the time that is measured; PNG was encoded before.
"""

import asyncio
import base64
import json
import resource
import secrets
import statistics
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from media_shapes import SHAPES, encoded, model_folder, pixels, recipe_of

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.config.job_file import with_overrides
from relax_hpc.config.run import RunConfig
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.expand import expand
from relax_hpc.data.media.kinds import Modality
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.errors import EngineError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.http import AsyncHttp
from relax_hpc.inference.pool import Endpoint, Pool
from relax_hpc.inference.process import start_engine
from relax_hpc.roles.engine.host import EngineSlot, spec_of
from relax_hpc.runtime.files.scratch import scratch_folder

AIM = 5.0
"""Requests per second, by those of PNG."""
_TOKEN = secrets.token_hex(16)
_SILENCE_S = 600.0
_TEXT = "What is in the middle of the picture?"


class Work(NamedTuple):
    """The requests of a turn."""

    images: int = 24
    siblings: int = 8
    """Requests that are shown one image."""
    side: int = 1024
    """Pixels of a side of an image."""
    repeats: int = 3

    @property
    def requests(self) -> int:
        return self.images * self.siblings


class Figures(NamedTuple):
    """Seconds of every turn."""

    ours: list[float]
    stock: list[float]


def measure(
    shape: str, work: Work, *, overrides: Sequence[str] = (), python: str | None = None
) -> list[ReportRow]:
    """Starts an engine, of random weights if a shape is named, and asks it both ways, in turns."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with scratch_folder("bench") as folder:
        model = model_folder(shape, folder)
        config = _config(shape, model, work, overrides)
        with start_engine(
            spec_of(config, EngineSlot("", 0, 0)),
            host="127.0.0.1",
            token=_TOKEN,
            log_path=folder / "engine.log",
            python=python,
        ) as engine:
            figures = asyncio.run(_take(engine.url, model, work))
    return _rows(figures, work)


def _rows(figures: Figures, work: Work) -> list[ReportRow]:
    """Requests per second of both, the ratio that of each turn."""
    ratio = statistics.median(b / a for a, b in zip(figures.ours, figures.stock, strict=True))
    speeds = [work.requests / statistics.median(each) for each in (figures.ours, figures.stock)]
    name = f"{work.images} x {work.siblings} requests, {work.side} x {work.side}"
    return [ReportRow(name, speeds[0], "requests/s", "PNG, encoded before", speeds[1], ratio, AIM)]


async def _take(url: str, model: Path, work: Work) -> Figures:
    return await _Turns(url, model, work).all()  # made where a loop runs


class _Photo(NamedTuple):
    """An image of a turn, for both ways."""

    source: MediaSource
    png: str
    """Canonical pixels as a `data:` URL."""


class _Turns:
    """Turns of both ways on one engine."""

    def __init__(self, url: str, model: Path, work: Work) -> None:
        from transformers import AutoTokenizer

        self._url, self._work, self._recipe = url, work, recipe_of(model)
        family = self._recipe.family
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        text = family.wrapped["image"] + _TEXT
        self._prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
        image = tokenizer.convert_tokens_to_ids(family.placeholders["image"])
        self._placeholders: dict[int, Modality] = {image: "image"}
        self._pool = Pool(
            lambda at: GenerationClient(at.url, at.token, silence_s=_SILENCE_S),
            max_in_flight=work.requests,
            patience_s=_SILENCE_S,
        )
        self._pool.enlist({Endpoint("engine", "0", url, _TOKEN): "serving"})
        self._http = AsyncHttp(url, _TOKEN, silence_s=_SILENCE_S)

    async def all(self) -> Figures:
        """Takes all turns; the first does not count: processes start, kernels are made."""
        figures = Figures([], [])
        async with MediaWorkers(self._recipe, Decoders(None)) as workers:
            for turn in range(self._work.repeats + 1):
                photos = await self._drawn(turn)
                ours = [self._ours(each, turn, workers) for each in photos]
                figures.ours.append(await self._timed(ours))
                figures.stock.append(await self._timed([self._stock(each) for each in photos]))
        await self._pool.aclose()
        await self._http.aclose()
        return Figures(*(each[1:] for each in figures))

    async def _drawn(self, turn: int) -> list[_Photo]:
        """The images of a turn."""
        numbers = range(turn * self._work.images, (turn + 1) * self._work.images)
        return await asyncio.gather(*(asyncio.to_thread(self._draw, n) for n in numbers))

    def _draw(self, number: int) -> _Photo:
        side = self._work.side
        data = encoded(pixels(number, side, side), "JPEG")
        source = MediaSource(f"photo {number}", "image", data=data)
        array = canonical(measure_medium(source, self._recipe), self._recipe).array[0]
        png = base64.b64encode(encoded(array.astype(np.uint8), "PNG")).decode()
        return _Photo(source, f"data:image/png;base64,{png}")

    async def _timed(self, asked: Sequence[Coroutine[Any, Any, None]]) -> float:
        """Seconds until all are answered, by an engine that knows no prefix of them."""
        with EngineClient(self._url, _TOKEN) as client:
            await asyncio.to_thread(client.flush_cache)
        begin = time.perf_counter()
        await asyncio.gather(*asked)
        return time.perf_counter() - begin

    async def _ours(self, photo: _Photo, turn: int, workers: MediaWorkers) -> None:
        """Asks for all siblings as a rollout task does."""
        medium = measure_medium(photo.source, self._recipe)
        found = expand(self._prompt, [medium.extent], self._placeholders)
        async with workers.prepare([medium], found.spans) as made:
            how = Sampling(1.0, 1, ignore_eos=True, view=made.view)
            homes = ((turn, photo.source.place),)
            samples = [
                self._pool.sample(found.token_ids, seed, how, homes=homes)
                for seed in range(self._work.siblings)
            ]
            for sample in await asyncio.gather(*samples):
                self._check("ours", len(sample.token_ids), 1)

    async def _stock(self, photo: _Photo) -> None:
        """Asks for all siblings as SGLang's users do: each request has the whole image."""
        medium = measure_medium(photo.source, self._recipe)
        expanded = len(expand(self._prompt, [medium.extent], self._placeholders).token_ids)
        sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}

        async def ask() -> None:
            body = {
                "input_ids": self._prompt, "image_data": [photo.png], "sampling_params": sampling,
                "return_logprob": True, "stream": False,
            }  # fmt: skip
            pieces = [piece async for piece in self._http.stream("POST", "/generate", body)]
            meta = json.loads(b"".join(pieces))["meta_info"]
            self._check("PNG", int(meta["completion_tokens"]), 1)
            self._check("PNG, tokens of the prompt", int(meta["prompt_tokens"]), expanded)

        await asyncio.gather(*(ask() for _ in range(self._work.siblings)))

    def _check(self, name: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise EngineError(f"{self._url}: {name}: {found} tokens, {wanted} are expected")


def _config(shape: str, model: Path, work: Work, overrides: Sequence[str]) -> RunConfig:
    import torch

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    args = {"load_format": "dummy"} if shape in SHAPES else {}
    engine = {"kind": "sglang", "max_running_requests": work.requests, "args": args}
    tree = {
        "name": "bench", "model": {"path": str(model), "dtype": dtype},
        "prompts": {"train": "unused"}, "engines": {"rollout": engine},
        "schedule": {"num_steps": 1},
    }  # fmt: skip
    config = with_overrides(tree, overrides, source="bench media")
    assert isinstance(config, RunConfig)
    return config
