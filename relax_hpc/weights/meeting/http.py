"""Invites engines by a request to each, from rank 0 of the trainer."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Engines, Member
from relax_hpc.weights.meeting.invitation import CarrierName, Invitation, Joins


class HttpCarrier:
    way: CarrierName = "http"
    problem = ""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def reaches(self, engines: Engines, timeout_s: float) -> list[Member]:
        """Returns all: there is nobody to wait for."""
        return list(engines)

    def invite(self, engines: Engines, invitations: Mapping[Member, Invitation]) -> Joins:
        """Asks each in a thread: an engine answers when all ranks of the group are there."""
        return {
            member: self._threads.submit(join, engines[member], invitation)
            for member, invitation in invitations.items()
        }

    def close(self) -> None: ...


def join(engine: EngineClient, asked: Invitation) -> None:
    """Has an engine join; blocks until all its ranks have.

    Raises:
        EngineError: it did not.
    """
    engine.init_weights_group(
        asked.host, asked.port, asked.offset, asked.size, asked.group, asked.backend
    )
