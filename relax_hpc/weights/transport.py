"""The protocol of every way of bringing weights to engines, and calls that all of them make."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

from relax_hpc.comm.orders import Receipt
from relax_hpc.errors import EngineError
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import HEALTH_S
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.exchange import MemberError
from relax_hpc.weights.staging import Outgoing
from relax_hpc.weights.verify import Sent

Way = Literal["lanes", "collective", "files"]
WAYS: tuple[Way, ...] = get_args(Way)
"""The quickest first."""
Answer = TypeVar("Answer")
_CALL_GRACE_S = 5.0
_WAIT_S = 1.0


class Delivery(NamedTuple):
    """The outcome for one version. Members that it does not name hold a part of the weights, and
    have to be given all of them again."""

    taken: dict[Member, EngineControl]
    """Members that hold it, and are paused, unless `resumed`."""
    failed: dict[Member, str]
    """Members that are to be fenced, and why."""
    receipts: dict[Member, list[Receipt]]
    """The answers of the ranks of members that take a version in one call."""
    sent: Sent
    """The digests that `receipts` are compared with."""
    resumed: bool = False
    """Whether those that hold it go on already."""
    begun: Sequence[Member] = ()
    """Members that take it by themselves; `weights.loads` knows of them."""


class Transport(Protocol):
    """A way to bring weights to engines. Lives in rank 0 of the trainer, from update to update."""

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Does what can be done before engines stand still; times `gather` or `write`.

        Raises:
            SnapshotError: this transport is of no use at present.
        """
        ...

    def deliver(
        self,
        live: dict[Member, EngineControl],
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
            timers: get `pause`, `wire` or `load`, and what else engines wait for.
            check: whether receivers tell what they hold afterwards, where they can.
        """
        ...

    def leaves_receipts(self, member: Member) -> bool:
        """Whether its ranks say what they received."""
        ...

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Whether all of them have the buckets in which nothing learns: these can be skipped."""
        ...

    def settle(self, outgoing: Outgoing) -> None:
        """Ends a publication, whatever came of it; takes the stream to its end if it was begun."""
        ...

    def close(self) -> None: ...


def behind(
    threads: ThreadPoolExecutor, live: dict[Member, EngineControl], error: MemberError
) -> dict[Member, str]:
    """Returns who let an update fail, and how; the others are given it in the next attempt.

    One that dies or hangs makes the others fail as well, and they may be the first to say so; so
    whoever does not answer is behind it, if anybody.
    """
    health = threads.map(lambda receiver: receiver.health(HEALTH_S), live.values())
    silent = [member for member, ok in zip(live, health, strict=True) if not ok]
    blamed = [member for member in live if member in error.reasons]
    return {member: error.reasons.get(member, "does not answer") for member in silent or blamed}


def call_timeout_s(timeout_s: float) -> float:
    """Returns the timeout of a call that is part of an update: who is late is found at the update's
    own deadline, where all are looked at, and not by whose call happens to end first."""
    return timeout_s + _CALL_GRACE_S


def each(
    threads: ThreadPoolExecutor,
    receivers: dict[Member, EngineControl],
    call: Callable[[EngineControl], None],
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[dict[Member, EngineControl], dict[Member, str]]:
    """Calls all receivers at once; returns those that succeeded, and why others did not."""
    done, failed = answers(
        threads, receivers, lambda member: call(receivers[member]), timeout_s, on_wait
    )
    return {member: receivers[member] for member in done}, failed


def answers(
    threads: ThreadPoolExecutor,
    members: Iterable[Member],
    call: Callable[[Member], Answer],
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[dict[Member, Answer], dict[Member, str]]:
    """Makes a call for all members at once; returns the answers, and why others failed.

    Args:
        threads: make the calls.
        members: to call.
        call: of one member.
        timeout_s: of all together.
        on_wait: called about once a second meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    futures = {member: threads.submit(call, member) for member in members}
    found, failed = {}, {}
    while (left_s := deadline - time.monotonic()) > 0:
        if not wait(futures.values(), timeout=min(left_s, _WAIT_S)).not_done:
            break
        on_wait()
    for member, future in futures.items():
        try:
            found[member] = future.result(timeout=max(0.0, deadline - time.monotonic()))
        except (EngineError, TimeoutError) as error:
            failed[member] = str(error) or f"no answer within {timeout_s:.0f} s"
    return found, failed
