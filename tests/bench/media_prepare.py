"""Media from their files to engine, bus and trainer: CPU seconds, workers, the loop, bytes.

A prompt group is 8 siblings that are shown one image. The baseline is what is usual: for every
sample transformers' image processor makes the trainer's input, and the image is encoded as PNG for
the engine.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from media_shapes import encoded, model_folder, pixels, recipe_of

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.data.media import spool
from relax_hpc.data.media.canonical import Measured, canonical, digest_of, measure_medium
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.data.media.stored import StoredMedium, read_stored
from relax_hpc.data.media.workers import MOST_WORKERS, Decoders, MediaWorkers
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import NO_SPANS, FinishReason, Medium, PromptGroup, Trajectory

SIBLINGS = 8
_TEXT_TOKENS, _NEW_TOKENS = 100, 1000
_CPU_AIM, _WORKERS_AIM, _HOLD_AIM_MS, _BYTES_AIM = 50.0, 0.9, 20.0, 1.01
_TICK_S = 0.001
_GROUPS_IN_A_SHARD = 16
_PRODUCER = "bench-0"


class Work(NamedTuple):
    """The images to prepare."""

    side: int = 1000
    """Pixels of a side of an image."""
    images: int = 32
    """Images that workers decode in a round."""
    repeats: int = 3
    workers: int | None = None
    """Processes; None is one for each core, eight at most."""


class Holds(NamedTuple):
    """The longest time that callbacks kept an event loop, in seconds."""

    wall_s: float
    """Longest time from a tick to the next, above what was asked for."""
    cpu_s: float
    """Most CPU time of the loop's thread from a tick to the next."""


def measure(shape: str, work: Work) -> Iterator[ReportRow]:
    """Rows as they come; `shape` names one of `media_shapes.SHAPES` or a model's folder."""
    with scratch_folder("bench") as folder:
        model = model_folder(shape, folder)
        recipe = recipe_of(model)
        photos = [_photo(number, work.side) for number in range(work.images)]
        yield from _group(photos, recipe, model, folder, work.repeats)
        yield from asyncio.run(_workers(photos, recipe, work))
        for count in (1, min(_GROUPS_IN_A_SHARD, len(photos))):
            yield _bus(photos[:count], recipe, folder / str(count))


def _photo(number: int, side: int) -> MediaSource:
    data = encoded(pixels(number, side, side), "JPEG")
    return MediaSource(f"photo {number}", "image", data=data)


# A group.


def _group(
    photos: Sequence[MediaSource], recipe: Recipe, model: Path, folder: Path, repeats: int
) -> Iterator[ReportRow]:
    """CPU seconds of a group, ours and the usual way in turns, a photo for each repeat."""
    ours, usual = list[float](), list[float]()
    usually = _usual_way(model)
    usually(photos[-1])  # imports, and tables that are made once
    _ours(photos[-1], recipe, folder / "warm")
    for number in range(repeats):
        photo = photos[number % len(photos)]
        ours.append(_cpu_of(lambda: _ours(photo, recipe, folder / f"array-{number}")))  # noqa: B023
        usual.append(_cpu_of(lambda: usually(photo)))  # noqa: B023
    ratio = statistics.median(b / a for a, b in zip(ours, usual, strict=True))
    yield ReportRow(
        f"CPU of a group of {SIBLINGS}, an image each",
        1e3 * statistics.median(ours),
        "ms",
        "processor and PNG per sample",
        1e3 * statistics.median(usual),
        ratio,
        _CPU_AIM,
    )


def _cpu_of(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


def _ours(photo: MediaSource, recipe: Recipe, file: Path) -> None:
    """Does all that is done on CPUs for a group, from the source to a request for each sibling, and
    the trainer's reading of it."""
    medium = measure_medium(photo, recipe)
    found = canonical(medium, recipe)
    digest = digest_of(found.array)
    spool.write(file, found.array)
    kept = read_stored(medium, digest)
    span = MediaSpan(0, _TEXT_TOKENS, medium.extent.tokens[0])
    view = MediaView((Spooled(medium.extent, digest, file),), (span,))
    for _ in range(SIBLINGS):
        spool.text_of(view, 0)
    StoredMedium(kept, "bench").canonical(recipe)
    file.unlink()


def _usual_way(model: Path) -> Callable[[MediaSource], None]:
    import io

    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)

    def usually(photo: MediaSource) -> None:
        for _ in range(SIBLINGS):
            image = Image.open(io.BytesIO(photo.read())).convert("RGB")
            processor(images=[image], return_tensors="np")
            encoded(np.asarray(image), "PNG")

    return usually


# Workers.


async def _workers(photos: Sequence[MediaSource], recipe: Recipe, work: Work) -> list[ReportRow]:
    """Images per second of k processes and of one, in turns, and how they hold the loop."""
    count = work.workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    media = [measure_medium(photo, recipe) for photo in photos]
    one, many, holds = list[float](), list[float](), list[Holds]()
    one_process, processes = Decoders(1), Decoders(count)
    async with (
        MediaWorkers(recipe, one_process) as single,
        MediaWorkers(recipe, processes) as several,
    ):
        for workers in (single, several):  # until all processes are there
            await _decode(workers, media)
        for _ in range(work.repeats):
            one.append((await _decode(single, media))[0])
            seconds, hold = await _decode(several, media)
            many.append(seconds)
            holds.append(hold)
    speeds = [len(media) / statistics.median(seconds) for seconds in (many, one)]
    ratio = statistics.median(b / a for a, b in zip(many, one, strict=True))
    aim = _WORKERS_AIM * count
    wall_ms, cpu_ms = (1e3 * statistics.median(each) for each in zip(*holds, strict=True))
    return [
        ReportRow(f"{count} workers", speeds[0], "images/s", "one worker", speeds[1], ratio, aim),
        ReportRow("longest hold of the event loop", wall_ms, "ms", aim=_HOLD_AIM_MS),
        ReportRow("most CPU time of the loop at once", cpu_ms, "ms", aim=_HOLD_AIM_MS),
    ]


async def _decode(workers: MediaWorkers, media: Sequence[Measured]) -> tuple[float, Holds]:
    """Decodes all media at once: seconds, and how long the loop was held meanwhile."""

    async def one(medium: Measured) -> None:
        async with workers.prepare([medium], []):
            pass

    watch = asyncio.create_task(_watch(stop := asyncio.Event()))
    await asyncio.sleep(2 * _TICK_S)
    begin = time.perf_counter()
    await asyncio.gather(*map(one, media))
    seconds = time.perf_counter() - begin
    stop.set()
    return seconds, await watch


async def _watch(stop: asyncio.Event) -> Holds:
    """Looks again and again how long the loop took to come back."""
    wall_s = cpu_s = 0.0
    while not stop.is_set():
        begin, busy = time.perf_counter(), time.thread_time()
        await asyncio.sleep(_TICK_S)
        wall_s = max(wall_s, time.perf_counter() - begin - _TICK_S)
        cpu_s = max(cpu_s, time.thread_time() - busy)
    return Holds(wall_s, cpu_s)


# The bus.


def _bus(photos: Sequence[MediaSource], recipe: Recipe, folder: Path) -> ReportRow:
    """Bytes that media add to a shard of groups with an image each, by those of their sources."""
    plain, shown, source = list[PromptGroup](), list[PromptGroup](), 0
    for guid, photo in enumerate(photos):
        medium = measure_medium(photo, recipe)
        kept = read_stored(medium, canonical(medium, recipe).digest)
        group = _rows(guid, kept, medium.extent.tokens[0])
        shown.append(group)
        rows = [row._replace(media=(), media_spans=NO_SPANS) for row in group.trajectories]
        plain.append(PromptGroup(guid, rows))
        source += len(photo.read())
    added = _shard_bytes(folder / "shown", shown) - _shard_bytes(folder / "plain", plain)
    name = f"bytes of images on the bus, {len(photos)} in a shard, {SIBLINGS} siblings"
    return ReportRow(name, added / source, "of their files'", aim=_BYTES_AIM)


def _rows(guid: int, medium: Medium, tokens: int) -> PromptGroup:
    """A group whose token ids cannot be compressed."""
    prompt = _TEXT_TOKENS + tokens
    size = prompt + _NEW_TOKENS
    random = np.random.default_rng(guid)
    return PromptGroup(guid, [
        Trajectory(
            guid=guid, sibling=sibling, prompt_index=guid, seed=sibling,
            token_ids=random.integers(0, 150_000, size, dtype=np.int32), prompt_len=prompt,
            loss_mask=(np.arange(size) >= prompt).astype(np.uint8),
            columns={"rollout_logprobs": -random.random(size, dtype=np.float32)},
            version_runs=np.array([[prompt, 0]], np.int32), finish=FinishReason.STOP, reward=1.0,
            media=(medium,), media_spans=np.array([[0, _TEXT_TOKENS, tokens]], np.int32),
        )
        for sibling in range(SIBLINGS)
    ])  # fmt: skip


def _shard_bytes(folder: Path, groups: Sequence[PromptGroup]) -> int:
    bus = BusPaths(folder)
    layout.create(bus, [_PRODUCER], {})
    before = _bytes_in(folder)
    with Producer(bus, _PRODUCER, {}) as producer:
        producer.put(groups)
        return _bytes_in(folder) - before


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
