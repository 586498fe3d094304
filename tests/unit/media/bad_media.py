"""Media that cannot be used, each with what is said of it: with 2 s of sound, 5 frames a second."""

import io
import zlib

import numpy as np
from media_files import clip, encoded, photo, tone
from PIL import Image


def animation(form="GIF"):
    frames = [Image.fromarray(np.full((40, 40, 3), n, np.uint8)) for n in (0, 90, 200)]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


def sound_only():
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return made.getvalue()


def shows_nothing():
    """A WEBM with a track of video, and sound only."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="webm") as container:
        shown = container.add_stream("libvpx-vp9", rate=10)
        shown.width, shown.height, shown.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream("libopus", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.int16), "s16", "mono")
        frame.sample_rate = 48000
        container.mux([*heard.encode(frame), *heard.encode()])
    return made.getvalue()


def without_rate():
    """A WEBM of one frame, without the length of it: 0x23e383 begins that, 0xec a void."""
    data = clip([0], form="webm")
    at = data.index(b"\x23\xe3\x83\x84")
    return data[:at] + b"\xec\x86" + bytes(6) + data[at + 8 :]


def bomb():
    """A PNG whose header says 30,000 x 30,000 pixels."""
    data = bytearray(encoded(Image.new("1", (8, 8))))
    data[16:24] = (30000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def size(width, height):
    return encoded(Image.new("RGB", (width, height)))


def floats(of_one):
    """Half a second of sound in floats, one of which is `of_one`."""
    import soundfile

    wave, made = np.sin(np.arange(8000) / 5), io.BytesIO()
    wave[777] = of_one
    soundfile.write(made, wave, 16000, format="WAV", subtype="DOUBLE")
    return made.getvalue()


VARIABLE = [*range(10), *range(60, 90), *range(200, 210)]
CASES = {
    "empty image": ("image", b"", "is empty; replace it, or remove the line"),
    "not an image": ("image", b"hello", "is none of the encodings that are known; save it as JPEG"),
    "truncated png": ("image", photo(90, 90)[:-900], "is PNG that cannot be decoded: "),
    "truncated jpeg": ("image", photo(90, 90, "JPEG")[:-600], "is JPEG that cannot be decoded: "),
    "a video as image": ("image", clip([0, 1]), "is MP4, of video; name it under videos"),
    "a sound as image": ("image", tone(0.1), "is WAV, of audio; name it under audios"),
    "gif": ("image", animation(), "is GIF; save it as JPEG, PNG or WEBP"),
    "animation": ("image", animation("WEBP"), "is an animation of 3 frames; save one of them"),
    "no pixel": ("image", photo().replace(b"\0\0\0d\0\0\0<", b"\0\0\0\0\0\0\0<"), "cannot be dec"),
    "one pixel": ("image", size(1, 1), "has 1 x 1 pixels; replace it, or remove the line"),
    "aspect": ("image", size(900, 4), "has 900 x 4 pixels: one side is more than 200 times"),
    "bomb": ("image", bomb(), "has too many pixels: "),
    "not a video": ("video", b"\0\0\0\x20ftypisom" + b"x" * 90, "is MP4 that cannot be decoded: "),
    "no video in it": ("video", sound_only(), "is MP4 without a video; replace it"),
    "no frames": ("video", shows_nothing(), "has no frames; replace it, or remove the line"),
    "no rate": ("video", without_rate(), "does not say how many frames it has a second; write it"),
    "truncated video": ("video", clip(range(30))[:900], "is MP4 that cannot be decoded: "),
    "short video": ("video", clip([0, 1, 2]), "has 3 frames, fewer than prompts.media.video_fram"),
    "variable rate": ("video", clip(VARIABLE), "has frames at a variable rate: number "),
    "no sound": ("audio", tone(0), "has 0 s of sound, fewer than 0.025; replace it"),
    "silence": ("audio", tone(0.5, loud=0), "is silent; replace it, or remove the line"),
    "no numbers": ("audio", floats(np.nan), "has samples that are infinite or no numbers; write"),
    "beyond floats": ("audio", floats(1e200), "has samples that are infinite or no numbers; wri"),
    "rate": ("audio", tone(0.1, 800_000), "has 800,000 samples a second, more than 768,000; wri"),
    "8 channels": ("audio", tone(0.5, channels=8), "has 8 channels; mix it down to one or two"),
    "long sound": (
        "audio",
        tone(2.5),
        "has 2.5 s of sound, prompts.media.advanced.audio_max_s = 2; cut",
    ),
    "truncated sound": ("audio", tone(0.5, form="FLAC")[:60], "is FLAC that cannot be decoded: "),
}
