"""Whose turn it is on GPUs that the trainer shares with its engines: one record, the lead's.

An engine says STARTING before it looks here, and takes no memory unless the turn is its own; the
lead says that the turn is the trainer's before it looks who is STARTING. So both notice.
"""

from typing import Literal, NamedTuple

from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

Holder = Literal["trainer", "engines"]


class Turn(NamedTuple):
    attempt: str
    """Of the job; the turn of an earlier one means nothing."""
    holder: Holder


def give(paths: RunPaths, attempt: str, holder: Holder) -> None:
    write_json(paths.turn, Turn(attempt, holder)._asdict())


def is_of_engines(paths: RunPaths, attempt: str) -> bool:
    """Whether engines of this attempt may take memory."""
    record = read_json(paths.turn)
    return record is not None and Turn(**record) == (attempt, "engines")
