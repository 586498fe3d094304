"""Media that no model should be shown, told by their headers."""

from relax_hpc.media.facts import Facts
from relax_hpc.media.recipe import Recipe
from relax_hpc.media.source import Source

MOST_ASPECT = 200
MOST_PIXELS = 2**27
"""Pixels of an image or of a frame; more of them is an attack, or a mistake."""
MOST_CHANNELS = 2
MOST_RATE = 768_000
"""Samples of sound per second; room is made for as many as the header says."""
LEAST_S = 0.025
"""Seconds of the shortest sound: a window of the mel spectrum."""


def check(source: Source, facts: Facts, recipe: Recipe) -> None:
    """Refuses a medium that cannot be used.

    Raises:
        ConfigError: its shape, length or rate is outside what the recipe allows.
    """
    if facts.modality != "audio":
        _check_size(source, facts.height, facts.width)
    if facts.modality == "video":
        _check_frames(source, facts, recipe)
    if facts.modality == "audio":
        _check_length(source, facts, recipe)


def _check_size(source: Source, height: int, width: int) -> None:
    if min(height, width) < 2:
        raise source.refused(f"has {width} x {height} pixels; replace it, or remove the line")
    if height * width > MOST_PIXELS:
        raise source.refused(
            f"has {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}; make it smaller"
        )
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise source.refused(
            f"has {width:,} x {height:,} pixels: one side is more than {MOST_ASPECT} times the "
            "other; crop it"
        )


def _check_frames(source: Source, facts: Facts, recipe: Recipe) -> None:
    video = recipe.video
    if facts.num_frames < 1:
        raise source.refused("has no frames; replace it, or remove the line")
    if facts.fps <= 0:
        raise source.refused(
            "does not say how many frames it has a second; write it again, e.g. ffmpeg -i it -r 30"
        )
    least = max(video.least_frames, video.vision.time)
    if facts.num_frames < least:
        raise source.refused(
            f"has {facts.num_frames} frames, fewer than prompts.media.video_frames = [{least}, "
            f"{video.most_frames}]; lower it, or remove the line"
        )


def _check_length(source: Source, facts: Facts, recipe: Recipe) -> None:
    assert recipe.audio is not None, "models that do not hear are given no sound"
    if facts.sampling_rate > MOST_RATE:
        raise source.refused(
            f"has {facts.sampling_rate:,} samples a second, more than {MOST_RATE:,}; write it "
            "again, e.g. ffmpeg -i it -ar 48000"
        )
    length_s = facts.num_samples / facts.sampling_rate
    if length_s < LEAST_S:
        raise source.refused(
            f"has {length_s:g} s of sound, fewer than {LEAST_S}; replace it, or remove the line"
        )
    if length_s > recipe.audio.max_s:
        raise source.refused(
            f"has {length_s:.1f} s of sound, prompts.media.audio_max_s = {recipe.audio.max_s:g}; "
            "cut it, or raise that"
        )
