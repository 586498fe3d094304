"""The media of a request to an engine, as one text: where the arrays lie, or all of them."""

import base64
import io
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relax_hpc.media.expand import Span
from relax_hpc.media.extent import Extent
from relax_hpc.media.spool import Spooled, View
from relax_hpc.schema import Array

BEGIN = "relax-media:"
"""Beginning of the text, which no URL and no base64 has."""
MISSING = "relax-media-missing"
"""Beginning of an engine's answer that it cannot read the files: it runs on another node."""


class Sent(NamedTuple):
    """A view that was sent."""

    view: View
    policy_version: int
    """Policy version of the engine when it was asked."""
    contents: tuple[bytes, ...] = ()
    """Files of the media, if they were sent along."""


def text_of(view: View, policy_version: int, *, with_contents: bool = False) -> str:
    """Writes a view; its files are read if they are to go along."""
    media = [
        {
            "extent": each.extent._asdict(),
            "digest": each.digest.hex(),
            "path": str(each.path),
            "content": base64.b64encode(each.path.read_bytes()).decode() if with_contents else "",
        }
        for each in view.media
    ]
    said = {"version": policy_version, "spans": view.spans, "media": media}
    return BEGIN + json.dumps(said, separators=(",", ":"))


def view_of(text: str) -> Sent:
    """Reads what `text_of` wrote.

    Raises:
        ValueError: it did not write that.
    """
    said = json.loads(text.removeprefix(BEGIN))
    try:
        media = [
            Spooled(_extent(each["extent"]), bytes.fromhex(each["digest"]), Path(each["path"]))
            for each in said["media"]
        ]
        spans = [Span(*(int(number) for number in span)) for span in said["spans"]]
        contents = [base64.b64decode(each["content"]) for each in said["media"]]
        version = int(said["version"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no media of relax-hpc: {error!r}") from None
    view = View(tuple(media), tuple(spans))
    return Sent(view, version, tuple(contents) if all(contents) else ())


def array_in(file: bytes) -> Array:
    """Reads the array of a file of the spool; raises ValueError if it is none."""
    array: Array = np.load(io.BytesIO(file), allow_pickle=False)
    return array


def _extent(said: dict[str, object]) -> Extent:
    lists = {key: tuple(value) for key, value in said.items() if isinstance(value, list)}
    return Extent(**{**said, **lists})  # type: ignore[arg-type]
