"""Engines that can receive weights: each is a record that its owner writes, and nobody else."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from relax_hpc.config.rollout import Transport
from relax_hpc.fleet import seen
from relax_hpc.fleet.seen import Seen
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

log = logging.getLogger(__name__)

State = Literal["WAITING", "STARTING", "HEALTHY", "DRAINING", "GONE", "FAILED"]

_REFRESH_S = 60.0
"""There are many."""
_START = re.compile(r"(.+)\.(\d+)-(\d+)-\d+")
"""Job, restarts of it, starts of the task's step within that, starts of the engine."""


class Member(NamedTuple):
    """One engine, as its owner announces it."""

    id: str
    start: str
    """Changes with every start of the engine, so a restarted one is never taken for the one
    before: job attempt, start of the task's step, start of the engine within it."""
    url: str
    """Empty until the engine answers. Its token follows from id and start, see `run_secret`."""
    num_ranks: int
    """Ranks the engine brings into the weight group."""
    engine: str
    """embedded or sglang."""
    state: State
    """WAITING: has nothing of its GPUs, which are the trainer's for now. STARTING: of no use yet.
    HEALTHY: may be updated, and asked once it holds the newest version. DRAINING: finishes what it
    has and gets nothing new. GONE: its owner stopped it. FAILED: it does not come back by
    itself."""
    reason: str = ""
    """The present work of a STARTING engine; the cause if it is FAILED."""
    lane: int = -1
    """Rank of the trainer whose GPU the engine's first rank is on, with the others following; -1:
    the engine has GPUs of its own."""
    transport: Transport = "collective"
    """The way in which weights get to it, if its pool follows the policy."""
    pool: str = "rollout"
    """Name of the pool in the job: its table is `[engines.NAME]`."""
    version: int = -1
    """Policy version that its owner has loaded; -1: none, or the trainer says which."""

    @property
    def takes_orders(self) -> bool:
        """Whether it takes a version in one call (`comm.orders`), or a call per bucket."""
        return self.engine == "sglang"


def attempt_of(member: Member) -> str:
    """The attempt of the job in which it was started."""
    return member.start.rsplit("-", 2)[0]


def announce(paths: RunPaths, member: Member) -> None:
    """Records a member, unless a later task of the same job has done so.

    Its owner may be one that was cut off while Slurm started the job, or its step, again.
    """
    there = find(paths, member.id)
    if there is not None and _is_later(there.start, member.start):
        log.warning("%s: start %s is on record, %s is over", member.id, there.start, member.start)
        return
    write_json(paths.member(member.id), member._asdict())
    seen.folder_at(paths.members).note()


def _is_later(start: str, other: str) -> bool:
    """Whether it is of a task that the same job started after that of the other one.

    Ids of jobs do not tell which of two was later.
    """
    found, before = _START.fullmatch(start), _START.fullmatch(other)
    if found is None or before is None or found[1] != before[1]:
        return False
    return (int(found[2]), int(found[3])) > (int(before[2]), int(before[3]))


def follow(paths: RunPaths) -> Seen[Member | None]:
    """Members by id, in whatever state, for who looks again and again; None of those that were
    never announced."""
    return Seen(paths.members, partial(find, paths), refresh_s=_REFRESH_S)


def find(paths: RunPaths, member: str) -> Member | None:
    """The record of one member in whatever state; None if it never was announced."""
    record = read_json(paths.member(member))
    if record is None:
        return None
    # A run that was resumed may be older than what is a field today.
    return Member(**{key: record[key] for key in Member._fields if key in record})


def announce_extras(paths: RunPaths, ids: Sequence[str]) -> None:
    """Says which engines there are, or soon will be, besides those the job started with."""
    write_json(paths.extras, {"ids": list(ids)})


def extras(paths: RunPaths) -> list[str]:
    """The ids last announced. A file of known name: listings of a folder can be stale for long."""
    record = read_json(paths.extras)
    return [] if record is None else list(record["ids"])


def follow_extras(paths: RunPaths) -> Callable[[], list[str]]:
    """Does as `extras`, for who asks again and again."""
    return seen.follow(paths.extras, partial(extras, paths))
