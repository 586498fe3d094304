"""A public data set: where it comes from, and what its rows say."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.media.kinds import Modality
from relax_hpc.prompts.files import KINDS
from relax_hpc.rewards.answers import last_tag


class Task(NamedTuple):
    prompt: str
    answer: str
    images: tuple[str, ...] = ()
    """Files in the folder of the prompts, in the order of the places of the prompt."""
    videos: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.images, *self.videos, *self.audios)


class Shown(NamedTuple):
    """A medium of a row."""

    modality: Modality
    content: bytes | Path
    """Bytes of the file, or the path of it."""


class DataSet(NamedTuple):
    name: str
    """As the command line and `source` of a prompt say it."""
    hub: str
    """Name on the Hugging Face hub."""
    splits: tuple[str, ...]
    """Sets of it there, as a job names them behind the name."""
    task: Callable[[Mapping[str, Any]], Task]
    """Makes a task of a row, without its media; a ValueError says what is wrong with it."""
    media: Callable[[Mapping[str, Any], Path | None], Sequence[Shown]] = lambda _, __: ()
    """Media of a row of a file in a folder; a ValueError says what is wrong with them."""
    heldout: str = "test"
    """In the name of a file, or of a split, whose rows are not trained on."""
    kinds: tuple[str, ...] = KINDS
    """Ends of names of its files."""

    @property
    def download(self) -> str:
        """Command that fetches it, for a machine with a network."""
        return f"hf download {self.hub} --repo-type dataset --local-dir {self.name}"


def text(fields: Mapping[str, Any], key: str) -> str:
    """The text of a field.

    Raises:
        ValueError: there is none.
    """
    if key not in fields:
        raise ValueError(f"has no {key}, but {', '.join(fields) or 'nothing'}")
    if not isinstance(fields[key], str) or not fields[key].strip():
        raise ValueError(f"{key} is no text")
    return str(fields[key]).strip()


def image(value: object, key: str) -> Shown:
    """An image as Parquet files of the hub have it, {bytes, path}.

    Raises:
        ValueError: it is something else.
    """
    content = value.get("bytes") if isinstance(value, Mapping) else None
    if not isinstance(content, bytes) or not content:
        raise ValueError(f"{key} is no image with its bytes")
    return Shown("image", content)


def beside(folder: Path | None, value: object, key: str, modality: Modality) -> Shown:
    """A medium that lies beside the file of its row.

    Raises:
        ValueError: it does not, or not within that folder.
    """
    if folder is None or not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} names no file")
    path = (folder / value).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{key} = {value!r}: is outside of the folder of the rows")
    if not path.is_file():
        raise ValueError(f"{key} = {value!r}: there is no such file beside the rows")
    return Shown(modality, path)


def letter(fields: Mapping[str, Any], key: str, of: str) -> str:
    """The letter of a choice that a solution has in its tag.

    Args:
        of: letters that there are.

    Raises:
        ValueError: it has none of them.
    """
    found = (last_tag(text(fields, key), "answer") or "").strip()
    if len(found) != 1 or found not in of:
        raise ValueError(f"{key} has none of the letters {of} between <answer> and </answer>")
    return found
