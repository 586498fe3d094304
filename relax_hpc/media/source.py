"""The bytes of a medium: a file, part of a file, bytes of a row, or the frames of a video."""

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from relax_hpc import user_files
from relax_hpc.errors import ConfigError, MediumError, first_line, shown
from relax_hpc.media.kinds import Encoding, Modality, encoding_of, named

_TAR = re.compile(r"(?P<file>.+\.tar):(?P<name>.+):(?P<offset>\d+):(?P<size>\d+)", re.DOTALL)
_DATA = re.compile(r"data:(?P<type>[^,]*?)(?P<base64>;base64)?,", re.DOTALL)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FORMS = "write a path, {bytes}, a data: URL, or file.tar:name:offset:size"


class Source(NamedTuple):
    """A medium as a row of data names it."""

    place: str
    """Row and number of the medium, for messages: "x.jsonl, line 3: image 1"."""
    modality: Modality
    given: str = ""
    """Name that the row gives, for messages; "" of bytes."""
    path: Path | None = None
    data: bytes | None = None
    offset: int = 0
    """First byte of it in the file."""
    size: int | None = None
    """Bytes of it in the file; None is all of it."""
    frames: tuple["Source", ...] = ()
    """Images that are the frames of a video."""
    fps: float | None = None
    """Frames per second of `frames`, where the row says it."""
    is_of_video: bool = False
    """Whether it is the sound of a video, of which the bytes are."""
    folder: Path | None = None
    """Folder that its file may not leave, by links neither."""

    @property
    def label(self) -> str:
        return f"{self.place} ({self.given})" if self.given else self.place

    @property
    def its_sound(self) -> "Source":
        """The sound of this video."""
        return self._replace(place=f"{self.place}, its sound", modality="audio", is_of_video=True)

    def refused(self, said: str) -> MediumError:
        """Makes the error of a medium that cannot be used.

        Args:
            said: what is wrong with it; and what to do.
        """
        return MediumError(f"{self.label}: {said}")

    def opened(self) -> BinaryIO:
        """Opens it at its beginning.

        Raises:
            ConfigError: there is no such file, it cannot be read, it is outside the folder that it
                may not leave, or it has no such part.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None, "frames are opened one by one"
        try:
            file = user_files.opened(self.path, "correct the path, or remove the line")
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
            raise self.refused(
                f"ends at byte {self.offset + self.size:,} of a file of {there:,}; make the index "
                "of the archive again"
            )
        return cast(BinaryIO, io.BufferedReader(_Part(file, self.offset, self.size)))

    def _check_inside(self, file: BinaryIO) -> None:
        """Asks for the opened file: its path may lead elsewhere by now."""
        if self.folder is None:
            return
        there = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        if not there.is_relative_to(self.folder.resolve()):
            raise self.refused(
                f"is a link to {there}, outside prompts.media.folder = {self.folder}; copy the "
                "file there"
            )

    def read(self) -> bytes:
        """All of its bytes; raises as `opened`."""
        with self.opened() as file:
            return file.read()

    def encoding(self, file: BinaryIO) -> Encoding:
        """Returns the encoding of the opened file.

        Raises:
            ConfigError: it is empty, of another modality, or none that can be decoded.
        """
        found = encoding_of(file)
        if self.is_of_video and found.modality == "video":
            return found
        if found.modality == self.modality and found.kind is not None:
            return found
        if not file.read(1):
            raise self.refused("is empty; replace it, or remove the line")
        if found.modality not in (None, self.modality):
            raise self.refused(
                f"is {found.name}, of {found.modality}; name it under {found.modality}s, or "
                f"replace it by {named(self.modality)}"
            )
        remedy = f"save it as {named(self.modality)}, or remove the line"
        raise self.refused(f"is {found.name}; {remedy}")

    @contextmanager
    def decoding(self, encoding: Encoding) -> Iterator[None]:
        """Makes what a decoder raises a ConfigError that names this medium."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - decoders of others raise anything
            raise self.refused(
                f"is {encoding.name} that cannot be decoded: {first_line(error)}; replace it, or "
                "remove the line"
            ) from None


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

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
) -> Source:
    """Reads how a row names a medium; opens nothing.

    Args:
        place: row and number of the medium, for messages.
        modality: of the column.
        value: a path, bytes, {bytes, path}, a data: URL, "file.tar:name:offset:size"; of a video
            also a list of frames, or {frames, fps}.
        folder: where relative paths begin.
        inside: refuse paths that lead out of it, here those that say so, and links where they are
            opened.

    Raises:
        ConfigError: it is none of these, or a URL.
    """
    source = Source(place, modality, folder=folder if inside else None)
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
    raise source.refused(f"is {shown(value)}; {_FORMS}")


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _of_text(source: Source, text: str, folder: Path) -> Source:
    if found := _DATA.match(text):
        try:
            assert found["base64"]
            data = base64.b64decode(text[found.end() :], validate=True)
        except (AssertionError, binascii.Error):
            raise source.refused("is a data: URL that is not base64; encode it again") from None
        return source._replace(data=data)
    if _URL.match(text):
        raise source.refused(
            f"is {shown(text)}; a job downloads nothing: download it before, and write its path"
        )
    source = source._replace(given=text)
    if found := _TAR.fullmatch(text):
        source = source._replace(offset=int(found["offset"]), size=int(found["size"]))
        text = found["file"]
    path = Path(os.path.normpath(folder / text))
    if source.folder is not None and not path.is_relative_to(source.folder):
        raise source.refused(f"is outside prompts.media.folder = {folder}; move it there")
    return source._replace(path=path)


def _of_frames(source: Source, value: object, folder: Path, inside: bool) -> Source:
    fps: object = None
    if isinstance(value, Mapping):
        fps, value = value.get("fps"), value.get("frames")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e4:
            raise source.refused(
                f"has frames and fps = {shown(fps)}; give the frames per second of the list"
            )
    if not isinstance(value, list) or not value:
        raise source.refused(f"is {shown(value)}; {_FORMS}, or a list of frames")
    frames = tuple(
        source_of(f"{source.place}, frame {number}", "image", each, folder=folder, inside=inside)
        for number, each in enumerate(value, start=1)
    )
    return source._replace(frames=frames, fps=None if fps is None else float(cast(float, fps)))
