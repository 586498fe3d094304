"""A public data set: where it comes from, and what its rows say."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Task(NamedTuple):
    prompt: str
    answer: str
    images: tuple[str, ...] = ()
    """Files in the folder of the prompts, in the order of the places of the prompt."""


class DataSet(NamedTuple):
    name: str
    """As the command line and `source` of a prompt say it."""
    hub: str
    """Name on the Hugging Face hub."""
    splits: tuple[str, ...]
    """Sets of it there, as a job names them behind the name."""
    task: Callable[[Mapping[str, Any]], Task]
    """Makes a task of a row, without its images; a ValueError says what is wrong with it."""
    images: Callable[[Mapping[str, Any]], Sequence[bytes]] = lambda _: ()
    """Files of the images of a row; a ValueError says what is wrong with them."""

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


def image(value: object, key: str) -> bytes:
    """The file of an image as Parquet files of the hub have it, {bytes, path}.

    Raises:
        ValueError: it is something else.
    """
    content = value.get("bytes") if isinstance(value, Mapping) else None
    if not isinstance(content, bytes) or not content:
        raise ValueError(f"{key} is no image with its bytes")
    return content
