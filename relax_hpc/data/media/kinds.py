"""Detects encodings of media by their first bytes, never by file name."""

from typing import BinaryIO, Literal, NamedTuple, get_args

from relax_hpc.schema import MediaKind, Medium

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)

_HEAD_BYTES = 64


class Encoding(NamedTuple):
    name: str
    """Name in messages."""
    kind: MediaKind | None = None
    """None if it is not decoded here."""
    modality: Modality | None = None


_M = MediaKind
_ENCODINGS: tuple[tuple[int, bytes, Encoding], ...] = (
    (0, b"\xff\xd8\xff", Encoding("JPEG", _M.JPEG, "image")),
    (0, b"\x89PNG\r\n\x1a\n", Encoding("PNG", _M.PNG, "image")),
    (8, b"WEBP", Encoding("WEBP", _M.WEBP, "image")),
    (0, b"GIF8", Encoding("GIF", None, "image")),
    (0, b"BM", Encoding("BMP", None, "image")),
    (0, b"II*\0", Encoding("TIFF", None, "image")),
    (0, b"MM\0*", Encoding("TIFF", None, "image")),
    (4, b"ftypheic", Encoding("HEIC", None, "image")),
    (4, b"ftypmif1", Encoding("HEIC", None, "image")),
    (4, b"ftypavif", Encoding("AVIF", None, "image")),
    (4, b"ftypM4A", Encoding("M4A", None, "audio")),
    (4, b"ftyp", Encoding("MP4", _M.MP4, "video")),
    (0, b"\x1a\x45\xdf\xa3", Encoding("WEBM", _M.WEBM, "video")),
    (8, b"AVI ", Encoding("AVI", None, "video")),
    (8, b"WAVE", Encoding("WAV", _M.WAV, "audio")),
    (0, b"fLaC", Encoding("FLAC", _M.FLAC, "audio")),
    (0, b"OggS", Encoding("OGG", _M.OGG, "audio")),
    (0, b"ID3", Encoding("MP3", _M.MP3, "audio")),
    (0, b"\xff\xfb", Encoding("MP3", _M.MP3, "audio")),
    (0, b"\xff\xf3", Encoding("MP3", _M.MP3, "audio")),
    (0, b"\xff\xf2", Encoding("MP3", _M.MP3, "audio")),
)
VIDEOS = (_M.MP4, _M.WEBM)
"""Encodings that may hold sound, too."""
UNKNOWN = Encoding("none of the encodings that are known")


def encoding_of(file: BinaryIO) -> Encoding:
    """Detects the encoding of a file, and leaves it at its beginning."""
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    for offset, magic, encoding in _ENCODINGS:
        if head.startswith(magic, offset):
            return encoding
    return UNKNOWN


def name_encodings(modality: Modality) -> str:
    """Lists the encodings that can be decoded, for error messages."""
    names = [e.name for _, _, e in _ENCODINGS if e.kind is not None and e.modality == modality]
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} or {last}"


def modality_of(medium: Medium) -> Modality:
    """Returns the modality; a video file without a grid is the video's sound.

    Raises:
        ValueError: not decoded here.
    """
    kind = medium.kind
    if kind is MediaKind.TENSOR:
        still: Modality = "image" if any(medium.grid_thw) else "audio"
        return "video" if medium.frames else still
    if kind is MediaKind.FRAMES:
        return "video"
    if kind in VIDEOS and not any(medium.grid_thw):
        return "audio"
    for _, _, encoding in _ENCODINGS:
        if encoding.kind is kind and encoding.modality:
            return encoding.modality
    raise ValueError(f"{kind.name} is no encoding of a medium")


class MediaFacts(NamedTuple):
    """The header of a medium; zeros where its modality has no such value."""

    modality: Modality
    kind: MediaKind
    height: int = 0
    """Pixels as shown, after rotation."""
    width: int = 0
    num_frames: int = 0
    fps: float = 0.0
    """Mean frames per second of a video."""
    num_samples: int = 0
    """Samples of a sound, per channel."""
    sampling_rate: int = 0
