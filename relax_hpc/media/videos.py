"""Videos: MP4 and WEBM, or lists of images, to frames in RGB."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relax_hpc.media import images
from relax_hpc.media.extent import Extent
from relax_hpc.media.facts import Facts
from relax_hpc.media.recipe import Recipe
from relax_hpc.media.source import Source
from relax_hpc.schema import MediaKind

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream


def read_facts(source: Source, recipe: Recipe) -> Facts:
    """Reads the header, and decodes the first frame, which says how it is turned.

    Raises:
        ConfigError: it is no video; or a list of images that are not of one size.
    """
    if source.frames:
        return _of_list(source, recipe)
    with opened(source) as (container, stream, kind):
        first = next(container.decode(stream), None)
        if first is None:
            return Facts("video", kind, 2, 2)
        count = stream.frames if _are_all_shown(stream) else _counted(container, stream)
        height, width = first.height, first.width
        if _quarters(first) % 2:
            height, width = width, height
        return Facts("video", kind, height, width, count, float(stream.average_rate or 0))


def decoded(source: Source, facts: Facts, extent: Extent) -> npt.NDArray[np.uint8]:
    """Decodes the frames of the extent, turned as the file says, and resizes them.

    Returns:
        [frames, height, width, 3]

    Raises:
        ConfigError: it is damaged, or its frames are not evenly apart in time.
    """
    from PIL import Image

    if source.frames:
        found = (images.decoded(source.frames[n]) for n in extent.frames)
    else:
        found = (Image.fromarray(frame) for frame in _frames(source, facts, extent.frames))
    return np.stack([images.resized(frame, extent.size) for frame in found])


def _of_list(source: Source, recipe: Recipe) -> Facts:
    facts = [images.read_facts(frame) for frame in source.frames]
    height, width = facts[0].height, facts[0].width
    for frame, each in zip(source.frames, facts, strict=True):
        if (each.height, each.width) != (height, width):
            raise frame.refused(
                f"has {each.width} x {each.height} pixels, the first frame {width} x {height}; "
                "frames of a video have one size"
            )
    fps = source.fps or recipe.video.fps
    return Facts("video", MediaKind.FRAMES, height, width, len(facts), fps)


def _are_all_shown(stream: "VideoStream") -> bool:
    """Whether the header counts the frames, and says that they last as long as the video: where
    one was cut without being encoded again, its first and last frames are there to decode others.
    """
    if not stream.frames or not stream.duration or not stream.time_base:
        return stream.frames > 0
    last = stream.duration * stream.time_base * (stream.average_rate or 0)
    return round(last) == stream.frames


def _counted(container: "InputContainer", stream: "VideoStream") -> int:
    """Counts the frames that are shown, without decoding them."""
    container.seek(0)
    return sum(1 for each in container.demux(stream) if each.size and not each.is_discard)


def _quarters(frame: "VideoFrame") -> int:
    """Quarter turns against the clock; an angle between two is the nearer one."""
    quarters: int = round(frame.rotation / 90)
    return quarters % 4


def _frames(source: Source, facts: Facts, wanted: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the frames that are wanted, in order: [height, width, 3]."""
    apart_s = facts.num_frames / facts.fps / len(wanted)
    chosen, start_s, seen = frozenset(wanted), 0.0, 0
    with opened(source) as (container, stream, _):
        for number, frame in enumerate(container.decode(stream)):
            start_s = start_s if number else frame.time or 0.0
            seen = number + 1
            if number in chosen:
                _check_time(source, frame, number, start_s, facts.fps, apart_s / 2)
                turned = np.rot90(frame.to_ndarray(format="rgb24"), _quarters(frame))
                yield np.ascontiguousarray(turned)
            if number >= wanted[-1]:
                break
    if seen <= wanted[-1]:
        raise source.refused(
            f"says {facts.num_frames} frames, and ends after {seen}; replace it, or remove the line"
        )


def _check_time(
    source: Source, frame: "VideoFrame", number: int, start_s: float, fps: float, most_s: float
) -> None:
    """Refuses frames whose times are not what their numbers say: the model is told these."""
    said_s = number / fps
    is_s = (frame.time or 0.0) - start_s
    if abs(is_s - said_s) > most_s:
        raise source.refused(
            f"has frames at a variable rate: number {number} comes at {is_s:.2f} s, and at "
            f"{said_s:.2f} s with {fps:.4g} a second; write it again, e.g. ffmpeg -i it -r 30"
        )


@contextmanager
def opened(source: Source) -> Iterator[tuple["InputContainer", "VideoStream", MediaKind]]:
    """Opens a video with its first stream of frames.

    Raises:
        ConfigError: it is none, or has no frames.
    """
    import av

    with source.opened() as file:
        encoding = source.encoding(file)
        with source.decoding(encoding), av.open(file, "r") as container:
            if not container.streams.video:
                raise source.refused(
                    f"is {encoding.name} without a video; replace it, or remove the line"
                )
            assert encoding.kind is not None
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            yield container, stream, encoding.kind
