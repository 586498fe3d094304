"""Calls to several engines at once, beside which something is brought to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from torch.distributed import DistError

from relax_hpc.comm.orders import Order, Receipt, abort_key, key_of
from relax_hpc.comm.patience import GIVEN_UP
from relax_hpc.errors import EngineError
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member

_GRACE_S = 2.0
"""Time that engines get to say why a transfer has failed."""

Replies = Mapping[Member, "Future[Any]"]
Answers = dict[Member, "Future[list[Receipt]]"]
"""The receipts of all ranks of members; an error of a rank is one of the member."""


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
        if late and (not failure or time.monotonic() > deadline):
            failure = f"no answer within {self._timeout_s:.0f} s"
        if failure:
            raise MemberError(dict.fromkeys(late or replies, failure))

    def carry_out(
        self,
        serial: str,
        answers: Answers,
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
        shelf: Shelf,
    ) -> dict[Member, list[Receipt]]:
        """Does as `run` for an order whose answers lie on the shelf.

        Args:
            serial: of the order.
            answers: of `give_orders`.
            transfer: what the members wait for.
            deadline: of time.monotonic().
            shelf: of the members' ranks and this one.

        Returns:
            What the ranks of the members answered.

        Raises:
            MemberError: who let it fail; see `_blamed`. Nobody waits for more then.
        """

        def give_up(answer: "Future[list[Receipt]]") -> None:
            if answer.exception():
                shelf.put(abort_key(serial), "")

        # At once: a rank of the trainer that waits for this engine keeps the others waiting, too.
        for answer in answers.values():
            answer.add_done_callback(give_up)
        try:
            self.run(answers, transfer, deadline)
        except MemberError as error:
            # A GPU that waits for bytes waits for ever; its rank looks here, and gives up.
            shelf.put(abort_key(serial), "")
            wait(answers.values(), timeout=_GRACE_S)
            raise MemberError(_blamed(error.reasons, answers)) from error
        return {member: answer.result() for member, answer in answers.items()}


def give_orders(
    threads: ThreadPoolExecutor,
    receivers: dict[Member, EngineControl],
    orders: dict[Member, list[Order]],
    version: int,
    shelf: Shelf,
    ranks: Mapping[Member, Sequence[int]],
) -> Answers:
    """Calls all receivers.

    Args:
        threads: one is taken for each of them.
        receivers: at least one.
        orders: those of their ranks.
        version: of the policy.
        shelf: where the ranks leave their receipts.
        ranks: under which they do.
    """

    def carried_out(member: Member) -> list[Receipt]:
        receivers[member].receive_weights(orders[member], version=version)
        return _receipts(orders[member][0].serial, shelf, ranks[member])

    return {member: threads.submit(carried_out, member) for member in receivers}


def raise_refusals(replies: Replies) -> None:
    """Raises MemberError if a call has failed already."""
    if reasons := _refusals(replies):
        raise MemberError(reasons)


def _refusals(replies: Replies) -> dict[Member, str]:
    failed = {m: reply.exception() for m, reply in replies.items() if reply.done()}
    return {member: str(error) for member, error in failed.items() if error}


def _blamed(reasons: dict[Member, str], replies: Replies) -> dict[Member, str]:
    """Who let an order fail, and how, of those whom there are reasons to blame.

    One that fails makes all others give up, and they may be the first to say so. So these are
    blamed only if nobody else is, nor is silent.
    """
    known = reasons | _refusals(replies)
    own = {member: why for member, why in known.items() if not _gave_up(why)}
    silent = [member for member, reply in replies.items() if not reply.done()]
    return own or dict.fromkeys(silent, "did not answer when others gave up") or reasons


def _gave_up(error: str) -> bool:
    """Whether a rank ended for another's sake."""
    return error.endswith(GIVEN_UP)


def _receipts(serial: str, shelf: Shelf, ranks: Sequence[int]) -> list[Receipt]:
    """Takes the receipts of a member that has answered, so they are there.

    Raises:
        EngineError: a rank failed.
    """
    try:
        texts = [shelf.take(key_of(serial, rank), timeout_s=_GRACE_S) for rank in ranks]
    except DistError as error:
        raise EngineError("a rank did not say what it did") from error
    receipts = [Receipt.from_json(text) for text in texts]
    if errors := [receipt.error for receipt in receipts if receipt.error]:
        raise EngineError(min(errors, key=_gave_up))  # the first that is a rank's own, if any
    return receipts
