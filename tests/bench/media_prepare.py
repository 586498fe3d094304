"""CPU seconds of a prompt group: 8 siblings that are shown one image, from its file to the engine
and the trainer.

The baseline is what is usual: for every sample transformers' image processor makes the trainer's
input, and the image is encoded as PNG for the engine.
"""

import io
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from media_shapes import encoded, model_folder, pixels, recipe_of

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.data.media import spool
from relax_hpc.data.media.canonical import canonical, digest_of, measure_medium
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.data.media.stored import StoredMedium, read_stored
from relax_hpc.runtime.files.scratch import scratch_folder

SIBLINGS = 8
_TEXT_TOKENS, _CPU_AIM = 100, 50.0


class Work(NamedTuple):
    """The images to prepare."""

    side: int = 1000
    """Pixels of a side of an image."""
    repeats: int = 3


def measure(shape: str, work: Work) -> Iterator[ReportRow]:
    """CPU seconds of a group, ours and the usual way in turns, a photo for each repeat."""
    with scratch_folder("bench") as folder:
        model = model_folder(shape, folder)
        recipe, usually = recipe_of(model), _usual_way(model)
        ours, usual = list[float](), list[float]()
        for number in range(work.repeats + 1):  # the first: imports, and tables that are made once
            data = encoded(pixels(number, work.side, work.side), "JPEG")
            photo = MediaSource(f"photo {number}", "image", data=data)
            ours.append(_cpu_of(lambda: _ours(photo, recipe, folder / "array")))  # noqa: B023
            usual.append(_cpu_of(lambda: usually(photo)))  # noqa: B023
    ratio = statistics.median(b / a for a, b in zip(ours[1:], usual[1:], strict=True))
    ours_ms, usual_ms = (1e3 * statistics.median(each[1:]) for each in (ours, usual))
    name = f"CPU of a group of {SIBLINGS}, an image each"
    yield ReportRow(name, ours_ms, "ms", "processor and PNG per sample", usual_ms, ratio, _CPU_AIM)


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
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)

    def usually(photo: MediaSource) -> None:
        for _ in range(SIBLINGS):
            image = Image.open(io.BytesIO(photo.read())).convert("RGB")
            processor(images=[image], return_tensors="np")
            encoded(np.asarray(image), "PNG")

    return usually
