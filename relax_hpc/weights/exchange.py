"""Calls to several engines at once, beside which something is brought to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol

from torch.distributed import DistError

from relax_hpc.comm.orders import Order, Receipt, abort_key, key_of
from relax_hpc.comm.patience import GIVEN_UP
from relax_hpc.errors import EngineError
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member

_GRACE_S = 2.0
"""Time that engines get to say why a transfer has failed."""

Replies = dict[Member, "Future[None]"]


class MemberError(EngineError):
    """Some members did not do their part; the others' weights may be undefined as well."""

    def __init__(self, reasons: dict[Member, str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(f"{member.id}: {why}" for member, why in reasons.items()))


class Shelf(Protocol):
    """A place where the trainer and ranks of engines leave texts for each other."""

    def put(self, key: str, text: str) -> None: ...
    def take(self, key: str, *, timeout_s: float) -> str:
        """Raises DistError if nobody leaves it within `timeout_s`."""
        ...


class Exchange:
    """A transfer while members answer."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is what errors say of a deadline."""
        self._timeout_s = timeout_s

    def run(
        self,
        replies: Replies,
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
    ) -> None:
        """Does a transfer while the members answer.

        Raises:
            MemberError: those that refused, or if nobody did, those that did not answer in time.
        """
        failure = ""
        try:
            transfer(lambda: raise_refusals(replies))
            wait(replies.values(), timeout=deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
        except (RuntimeError, TimeoutError) as error:
            failure = str(error)
            wait(replies.values(), timeout=_GRACE_S, return_when=FIRST_EXCEPTION)
        raise_refusals(replies)
        late = [member for member, reply in replies.items() if not reply.done()]
        if late or failure:
            reason = f"no answer within {self._timeout_s:.0f} s" if late else failure
            raise MemberError(dict.fromkeys(late or replies, reason))

    def carry_out(
        self,
        serial: str,
        replies: Replies,
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
        shelf: Shelf,
        ranks: Mapping[Member, Sequence[int]],
    ) -> dict[Member, list[Receipt]]:
        """Does as `run` for an order whose answers lie on the shelf.

        Args:
            serial: of the order.
            replies: of the calls by which members were given it.
            transfer: what they wait for.
            deadline: of time.monotonic().
            shelf: of the members' ranks and this one.
            ranks: under which those of a member leave their receipts.

        Returns:
            What the ranks of the members answered.

        Raises:
            MemberError: as `run`, or what ranks say that failed. Nobody waits for more then.
        """

        def give_up(reply: "Future[None]") -> None:
            if reply.exception():
                shelf.put(abort_key(serial), "")

        # At once: a rank of the trainer that waits for this engine keeps the others waiting, too.
        for reply in replies.values():
            reply.add_done_callback(give_up)
        try:
            self.run(replies, transfer, deadline)
        except MemberError as error:
            # A GPU that waits for bytes waits for ever; its rank looks here, and gives up.
            shelf.put(abort_key(serial), "")
            wait(replies.values(), timeout=_GRACE_S)
            answered = [m for m, reply in replies.items() if reply.done() and not reply.exception()]
            told = _receipts(serial, shelf, {member: ranks[member] for member in answered})
            own = {m: why for m, why in _errors(told).items() if not why.endswith(GIVEN_UP)}
            raise MemberError(error.reasons | own) from error
        receipts = _receipts(serial, shelf, {member: ranks[member] for member in replies})
        if errors := _errors(receipts):
            shelf.put(abort_key(serial), "")
            raise MemberError(errors)
        return receipts


def give_orders(
    threads: ThreadPoolExecutor,
    receivers: dict[Member, EngineControl],
    orders: dict[Member, list[Order]],
    version: int,
) -> Replies:
    """Calls all receivers; `orders` are those of their ranks."""
    return {
        member: threads.submit(receiver.receive_weights, orders[member], version=version)
        for member, receiver in receivers.items()
    }


def raise_refusals(replies: Replies) -> None:
    """Raises MemberError if a call has failed already."""
    failed = {m: reply.exception() for m, reply in replies.items() if reply.done()}
    reasons = {member: str(error) for member, error in failed.items() if error}
    if reasons:
        raise MemberError(reasons)


def _receipts(
    serial: str, shelf: Shelf, ranks: Mapping[Member, Sequence[int]]
) -> dict[Member, list[Receipt]]:
    """Takes the receipts of members that have answered, so they are there."""
    found = dict[Member, list[Receipt]]()
    for member, places in ranks.items():
        try:
            texts = [shelf.take(key_of(serial, rank), timeout_s=_GRACE_S) for rank in places]
        except DistError:
            found[member] = [Receipt(error="a rank did not say what it did")]
        else:
            found[member] = [Receipt.from_json(text) for text in texts]
    return found


def _errors(receipts: dict[Member, list[Receipt]]) -> dict[Member, str]:
    """The first error of each member that had one, without those that gave up for another's sake,
    unless there is no other."""
    found = {m: [r.error for r in ranks if r.error] for m, ranks in receipts.items()}
    own = {m: [why for why in whys if not why.endswith(GIVEN_UP)] for m, whys in found.items()}
    errors = own if any(own.values()) else found
    return {member: whys[0] for member, whys in errors.items() if whys}
