"""What every way of bringing weights to engines has in common."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from relax_hpc.comm.orders import Receipt
from relax_hpc.errors import EngineError
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.exchange import MemberError
from relax_hpc.weights.members import Member
from relax_hpc.weights.receiver import Receiver
from relax_hpc.weights.staging import Outgoing

HEALTH_S = 5.0


class Delivery(NamedTuple):
    """What became of one version. Members that it does not name hold a part of it, and have to be
    given all of it again."""

    taken: dict[Member, Receiver]
    """Hold it, and are paused."""
    failed: dict[Member, str]
    """Are to be fenced, and why."""
    receipts: dict[Member, list[Receipt]]
    """What the ranks of those answered that take a version in one call."""


class Transport(Protocol):
    """One way. Lives in rank 0 of the trainer, and from update to update."""

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Does what can be done before engines stand still; times `gather`."""
        ...

    def deliver(
        self,
        live: dict[Member, Receiver],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """Pauses members in place and gives them what was staged; resuming is the caller's.

        Args:
            live: at least one.
            version: of the policy.
            outgoing: as staged.
            timers: get `pause`, `wire` and what else engines wait for.
            check: whether receivers tell what they hold afterwards, where they can.
        """
        ...

    def leaves_receipts(self, member: Member) -> bool:
        """Whether its ranks say what they received."""
        ...

    def settle(self) -> None:
        """Ends a publication, whether or not there was anybody to deliver to."""
        ...

    def close(self) -> None: ...


def behind(
    threads: ThreadPoolExecutor, live: dict[Member, Receiver], error: MemberError
) -> dict[Member, str]:
    """Who let an update fail, and how; the others are given it in the next attempt.

    One that dies makes the others fail as well, so those that are dead are behind it, if any.
    """
    blamed = [member for member in live if member in error.reasons]
    health = threads.map(lambda member: live[member].health(HEALTH_S), blamed)
    dead = [member for member, ok in zip(blamed, health, strict=True) if not ok]
    return {member: error.reasons[member] for member in dead or blamed}


def each(
    threads: ThreadPoolExecutor,
    receivers: dict[Member, Receiver],
    call: Callable[[Receiver], None],
    timeout_s: float,
) -> tuple[dict[Member, Receiver], dict[Member, str]]:
    """Calls all receivers at once; returns those that succeeded, and why others did not."""
    futures: dict[Member, Future[None]] = {
        member: threads.submit(call, receiver) for member, receiver in receivers.items()
    }
    done, failed = {}, {}
    for member, future in futures.items():
        try:
            future.result(timeout=timeout_s)
            done[member] = receivers[member]
        except (EngineError, TimeoutError) as error:
            failed[member] = str(error) or "no answer"
    return done, failed
