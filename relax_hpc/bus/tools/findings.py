"""The nouns in which a check of a bus reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from relax_hpc.bus.log import CommitRecord
from relax_hpc.bus.plan import PlanPosition


class Finding(NamedTuple):
    """Something a person should know about a bus."""

    kind: str
    """log, plan, credits, checkpoint, count, shard, missing or foreign; orphan."""
    where: str
    what: str
    harmful: bool = True
    """False for what any crash leaves, and what the protocol has dealt with already."""


class Commit(NamedTuple):
    """A committed shard and whose it is."""

    writer: str
    record: CommitRecord


Commits = Mapping[str, Commit]
"""Commits by uuid."""

Checkpoints = Callable[[], Sequence[PlanPosition]]
"""Places in the plan of the checkpoints that are kept now; a running trainer moves them."""
