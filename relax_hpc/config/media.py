"""Images, video and sound of prompts: how large they may become, and where they are."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from relax_hpc.sections import Number, Positive, Section, UserPath


def _ordered(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError(f"the first is the smaller one; write [{pair[1]}, {pair[0]}]")
    return pair


Bounds = Annotated[tuple[Positive, Positive], AfterValidator(_ordered)]


Store = Literal["source", "canonical", "smaller"]


class MediaConfig(Section):
    """Bounds that are not set are those of the model's own preprocessor."""

    image_tokens: Bounds | None = None
    """Fewest and most tokens of an image, e.g. [64, 1024]: it is made smaller or larger to fit."""
    video_fps: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """Frames a second that are taken from a video; of a list of frames, how many a second it has.
    """
    video_frames: Bounds | None = None
    """Fewest and most frames of a video; one with fewer cannot be used."""
    video_tokens_per_frame: Bounds | None = None
    """Fewest and most tokens that a frame of a video has room for; two frames share their tokens.
    """
    audio_in_video: bool = False
    """Whether a model that hears is given the sound of a video, too, interleaved with its frames by
    time. A video without sound is seen only."""
    audio_max_s: Annotated[Number, Field(gt=0, le=86400)] | None = None
    """Longest sound, in seconds; a longer one cannot be used."""
    broken: Literal["error", "skip"] = "error"
    """Fate of a row with a medium that cannot be used. error: the job is refused, or ends where the
    medium is decoded. skip: all media are decoded when the job is submitted, and the row is left
    out from the start, and listed in left_out.jsonl. One that breaks later ends the job."""
    store: Store = "source"
    """Form in which the bus keeps media. source: the bytes of their files, which the trainer
    decodes again and compares. canonical: the pixels or the spectrum themselves, about ten times
    the bytes of a photo, for nodes whose decoders differ. smaller: of each whichever is smaller,
    for videos of which few pixels are shown: decoding 10 s of 720p takes 0.4 s of a core."""
    workers: Positive | None = None
    """Processes of a rollout task, and of `submit`, that read and decode media. If it is not set,
    one for each core, and 8 at most."""
    folder: UserPath | None = None
    """Folder that paths of media count from, and may not leave, by links neither. If it is not set,
    they count from the folder of the data file."""
