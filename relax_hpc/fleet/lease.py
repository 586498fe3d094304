"""The lease on GPUs that the trainer shares with its engines: one record that rank 0 writes.

An engine says STARTING before it looks here, and takes no memory unless engines have the lease;
rank 0 gives the lease to the trainer before it looks who is STARTING. So both notice.
"""

from typing import Literal, NamedTuple

from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

Holder = Literal["trainer", "engines"]


class Lease(NamedTuple):
    attempt: str
    """Attempt of the job; the lease of an earlier one means nothing."""
    holder: Holder


def give(paths: RunPaths, attempt: str, holder: Holder) -> None:
    write_json(paths.lease, Lease(attempt, holder)._asdict())


def is_with_engines(paths: RunPaths, attempt: str) -> bool:
    """Whether engines of this attempt may take memory."""
    record = read_json(paths.lease)
    return record is not None and Lease(**record) == (attempt, "engines")
