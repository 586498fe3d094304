"""Reads the bytes of a medium: a file, part of a file, bytes of a row, or frames of a video."""

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from relax_hpc.data.media.kinds import Modality, encoding_of, name_encodings
from relax_hpc.errors import ConfigError, MediumError, first_line, show
from relax_hpc.runtime.files import user_files
from relax_hpc.schema import MediaKind

_TAR = re.compile(r"(?P<file>.+\.tar):(?P<name>.+):(?P<offset>\d+):(?P<size>\d+)", re.DOTALL)
_DATA = re.compile(r"data:(?P<type>[^,]*?)(?P<base64>;base64)?,", re.DOTALL)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FORMS = "write a path, {bytes}, a data: URL, or file.tar:name:offset:size"


class MediaSource(NamedTuple):
    """A medium as a row of data names it."""

    place: str
    """Row and number of the medium, for messages: "x.jsonl, line 3: image 1"."""
    modality: Modality
    given: str = ""
    """Name in the row, for messages; "" for bytes."""
    path: Path | None = None
    data: bytes | None = None
    offset: int = 0
    """Offset in the file."""
    size: int | None = None
    """Bytes in the file; None is all of it."""
    frames: tuple["MediaSource", ...] = ()
    """Images that are the frames of a video."""
    fps: float | None = None
    """Frames per second of `frames`, if the row says it."""
    is_of_video: bool = False
    """Whether it is the sound of a video with these bytes."""
    folder: Path | None = None
    """Folder that its file may not leave, not even by links."""

    @property
    def label(self) -> str:
        return f"{self.place} ({self.given})" if self.given else self.place

    @property
    def its_sound(self) -> "MediaSource":
        """Returns the sound of this video."""
        return self._replace(place=f"{self.place}, its sound", modality="audio", is_of_video=True)

    def make_error(self, said: str) -> MediumError:
        """Makes the error for an unusable medium.

        Args:
            said: the problem and the remedy.
        """
        return MediumError(f"{self.label}: {said}")

    def open_bytes(self) -> BinaryIO:
        """Opens it at its beginning.

        Raises:
            ConfigError: the file is missing, unreadable, outside its folder, or has no such part.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None, "frames are opened one by one"
        try:
            file = user_files.open_file(self.path, "correct the path, or remove the line")
        except ConfigError as error:
            raise MediumError(f"{self.place}: {error}") from None
        try:
            self._check_inside(file)
        except ConfigError:
            file.close()
            raise
        if self.size is None:
            return file
        there = os.fstat(file.fileno()).st_size
        if self.offset + self.size > there:
            file.close()
            raise self.make_error(
                f"ends at byte {self.offset + self.size:,} of a file of {there:,}; make the index "
                "of the archive again"
            )
        return cast(BinaryIO, io.BufferedReader(_FileSlice(file, self.offset, self.size)))

    def _check_inside(self, file: BinaryIO) -> None:
        """Checks the opened file: its path may lead elsewhere by now."""
        if self.folder is None:
            return
        there = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        if not there.is_relative_to(self.folder.resolve()):
            raise self.make_error(
                f"is a link to {there}, outside prompts.media.advanced.folder = {self.folder}; "
                "copy the file there"
            )

    def read(self) -> bytes:
        """Returns all bytes; raises as `open_bytes`."""
        with self.open_bytes() as file:
            return file.read()

    def _encoding(self, file: BinaryIO) -> tuple[str, MediaKind]:
        found = encoding_of(file)
        is_of_video = self.is_of_video and found.modality == "video"
        if found.kind is not None and (is_of_video or found.modality == self.modality):
            return found.name, found.kind
        if not file.read(1):
            raise self.make_error("is empty; replace it, or remove the line")
        if found.modality not in (None, self.modality):
            raise self.make_error(
                f"is {found.name}, of {found.modality}; name it under {found.modality}s, or "
                f"replace it by {name_encodings(self.modality)}"
            )
        remedy = f"save it as {name_encodings(self.modality)}, or remove the line"
        raise self.make_error(f"is {found.name}; {remedy}")

    @contextmanager
    def open_encoded(self) -> Iterator[tuple[BinaryIO, str, MediaKind]]:
        """Opens it for a decoder, with the name and kind of its encoding.

        Raises:
            ConfigError: as `open_bytes`; or it is empty, of another modality, or cannot be decoded.
        """
        with self.open_bytes() as file:
            name, kind = self._encoding(file)
            try:
                yield file, name, kind
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - decoders of others raise anything
                raise self.make_error(
                    f"is {name} that cannot be decoded: {first_line(error)}; replace it, or remove "
                    "the line"
                ) from None


class _FileSlice(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def source_of(
    place: str, modality: Modality, value: object, *, folder: Path, inside: bool = False
) -> MediaSource:
    """Reads how a row names a medium; opens nothing.

    Args:
        place: row and number of the medium, for messages.
        modality: of the column.
        value: a path, bytes, {bytes, path}, a data: URL, "file.tar:name:offset:size"; a video may
            also be a list of frames, or {frames, fps}.
        folder: base of relative paths.
        inside: refuse paths that leave it; links are checked when opened.

    Raises:
        ConfigError: it is none of these, or a URL.
    """
    source = MediaSource(place, modality, folder=folder if inside else None)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            source, value = source._replace(given=_name(value.get("path"))), value["bytes"]
        elif isinstance(value.get("path"), str):
            value = value["path"]
    if isinstance(value, bytes):
        return source._replace(data=value)
    if isinstance(value, str) and value:
        return _of_text(source, value, folder)
    if modality == "video" and isinstance(value, list | Mapping):
        return _of_frames(source, value, folder, inside)
    raise source.make_error(f"is {show(value)}; {_FORMS}")


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _of_text(source: MediaSource, text: str, folder: Path) -> MediaSource:
    if found := _DATA.match(text):
        try:
            assert found["base64"]
            data = base64.b64decode(text[found.end() :], validate=True)
        except (AssertionError, binascii.Error):
            raise source.make_error("is a data: URL that is not base64; encode it again") from None
        return source._replace(data=data)
    if _URL.match(text):
        raise source.make_error(
            f"is {show(text)}; a job downloads nothing: download it before, and write its path"
        )
    source = source._replace(given=text)
    if found := _TAR.fullmatch(text):
        source = source._replace(offset=int(found["offset"]), size=int(found["size"]))
        text = found["file"]
    path = Path(os.path.normpath(folder / text))
    if source.folder is not None and not path.is_relative_to(source.folder):
        raise source.make_error(
            f"is outside prompts.media.advanced.folder = {folder}; move it there"
        )
    return source._replace(path=path)


def _of_frames(source: MediaSource, value: object, folder: Path, inside: bool) -> MediaSource:
    fps: object = None
    if isinstance(value, Mapping):
        fps, value = value.get("fps"), value.get("frames")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e4:
            raise source.make_error(
                f"has frames and fps = {show(fps)}; give the frames per second of the list"
            )
    if not isinstance(value, list) or not value:
        raise source.make_error(f"is {show(value)}; {_FORMS}, or a list of frames")
    frames = tuple(
        source_of(f"{source.place}, frame {number}", "image", each, folder=folder, inside=inside)
        for number, each in enumerate(value, start=1)
    )
    return source._replace(frames=frames, fps=None if fps is None else float(cast(float, fps)))
