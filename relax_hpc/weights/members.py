"""Engines that can receive weights: each is a record that its owner writes."""

from pathlib import Path
from typing import NamedTuple

from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json


class Member(NamedTuple):
    """One engine, as its rollout task announces it."""

    id: str
    epoch: str
    """Changes with every start, so a restarted engine is never taken for the one before."""
    url: str
    token: str
    num_ranks: int
    """Ranks the engine brings into the weight group (its tensor parallel size)."""
    engine: str
    """embedded or sglang."""
    state: str
    """READY, or GONE once its owner has stopped it."""


def announce(paths: RunPaths, member: Member) -> None:
    path = paths.member(member.id)
    write_json(path, member._asdict())


def read(paths: RunPaths, ids: list[str]) -> list[Member]:
    """The members among `ids` that are there, in the order of `ids`."""
    found = (_read(paths.member(member)) for member in ids)
    return [member for member in found if member is not None and member.state == "READY"]


def _read(path: Path) -> Member | None:
    record = read_json(path)
    return None if record is None else Member(**record)
