"""A public data set: where it comes from, and what its rows say."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Task(NamedTuple):
    prompt: str
    answer: str


class DataSet(NamedTuple):
    name: str
    """As the command line and `source` of a prompt say it."""
    hub: str
    """Name on the Hugging Face hub."""
    splits: tuple[str, ...]
    """Sets of it there, as a job names them behind the name."""
    task: Callable[[Mapping[str, Any]], Task]
    """Makes a task of a row; a ValueError says what is wrong with it."""

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
