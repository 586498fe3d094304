"""Says which group an engine is to join, and whether it did."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol, Self

from relax_hpc.inference.members import Engines, Member

CarrierName = Literal["mpi", "files", "http"]


class Invitation(NamedTuple):
    """One engine's place in a weight group."""

    id: str
    task: str
    """Start of the task that owns it."""
    start: str
    """Start of the engine that is meant; another one refuses."""
    group: str
    host: str
    port: int
    """Address of the group's store, which rank 0 of the trainer keeps."""
    size: int
    """Ranks of the group: the trainer and all ranks of all engines."""
    offset: int
    """Rank of the engine's first rank."""
    num_ranks: int
    backend: Literal["gloo", "nccl"]
    plan: str
    """Digest of the bucket plan, which the store holds."""
    version: int
    """Policy version that is sent next."""

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**fields)


class JoinAnswer(NamedTuple):
    """The answer to an invitation."""

    id: str
    start: str
    group: str
    error: str = ""
    """Reason why the engine did not join."""


Joins = dict[Member, "Future[None]"]


class Carrier(Protocol):
    """Takes invitations to engines. Lives in rank 0 of the trainer."""

    way: CarrierName

    def reaches(self, engines: Engines, timeout_s: float) -> list[Member]:
        """Returns the members that it can invite, having waited for those that may come."""
        ...

    def invite(self, engines: Engines, invitations: Mapping[Member, Invitation]) -> Joins:
        """Asks all at once. A join ends when its engine has joined, with `EngineError` if not."""
        ...

    @property
    def problem(self) -> str:
        """Returns why it reaches nobody; "" if it does."""
        ...

    def close(self) -> None: ...


def invite(
    carriers: Sequence[Carrier],
    engines: Engines,
    invitations: Mapping[Member, Invitation],
    timeout_s: float,
) -> tuple[Joins, dict[str, str]]:
    """Invites each engine by the first carrier that reaches it.

    Returns:
        The joins, and how each engine was invited, by id, and why not better.
    """
    ways = dict[Member, Carrier]()
    for carrier in carriers:
        left = {member: client for member, client in engines.items() if member not in ways}
        ways |= dict.fromkeys(carrier.reaches(left, timeout_s) if left else (), carrier)
    joins: Joins = {}
    for carrier in carriers:
        own = {member: asked for member, asked in invitations.items() if ways[member] is carrier}
        joins |= carrier.invite(engines, own) if own else {}
    why = "; ".join(carrier.problem for carrier in carriers if carrier.problem)
    return joins, {
        member.id: carrier.way if carrier is carriers[0] or not why else f"{carrier.way} ({why})"
        for member, carrier in ways.items()
    }
