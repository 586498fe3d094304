"""Defines what the transports of weights share: orders to ranks and to engines, and their answers.

Rank 0 of the trainer tells the other ranks what a publication is (`TrainerRanks`), gives orders to
engines and finds out whom to blame (`Exchange`), and compares digests afterwards.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from torch import Tensor
from torch.distributed import DistError

from relax_hpc.errors import EngineError, SnapshotError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import HEALTH_S, Engines, Member
from relax_hpc.runtime.comm.orders import GIVEN_UP, Order, Receipt, abort_key, key_of
from relax_hpc.runtime.comm.torch_group import Shelf
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.weights.snapshot import Snapshot, SnapshotWriter
from relax_hpc.weights.staging import Outgoing

_GRACE_S = 2.0
"""Time engines get to report why a transfer failed."""
_CALL_GRACE_S = 5.0
_WAIT_S = 1.0
Replies = Mapping[Member, "Future[Any]"]
Receipts = dict[Member, Sequence[Receipt]]
Answer = TypeVar("Answer")


class MemberError(EngineError):
    """Some members failed their part; the weights of the others may be undefined as well."""

    def __init__(self, reasons: dict[Member, str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(f"{member.id}: {why}" for member, why in reasons.items()))


class Exchange:
    """Runs a transfer to several engines while their calls are pending."""

    def __init__(self, threads: ThreadPoolExecutor, timeout_s: float) -> None:
        """Errors about a missed deadline name `timeout_s`.

        Args:
            threads: at least as many as engines.
        """
        self._threads, self._timeout_s = threads, timeout_s

    def pause(self, receivers: Engines, deadline: float) -> None:
        """Raises as `run`."""
        pauses = {member: self._threads.submit(r.pause) for member, r in receivers.items()}
        self.run(pauses, lambda _: None, deadline)

    def run(
        self,
        replies: Replies,
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
    ) -> None:
        """Runs a transfer while the members answer.

        Raises:
            MemberError: members that refused; if none did, those that did not answer in time.
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
        orders: Mapping[Member, Sequence[Order]],
        receivers: Engines,
        version: int,
        ranks: Mapping[Member, Sequence[int]],
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
        shelf: Shelf,
    ) -> Receipts:
        """Does as `run`, for orders whose answers arrive through the shelf.

        Args:
            orders: of one serial, for the ranks of each member.
            ranks: numbers under which they leave receipts.
            deadline: of time.monotonic().
            shelf: shared by the members' ranks and this one.

        Returns:
            The receipts of the members' ranks.

        Raises:
            MemberError: the members to blame, see `_blame`. Nobody waits for more then.
        """
        [serial] = {order.serial for each in orders.values() for order in each}

        def carry_out(member: Member) -> list[Receipt]:
            receivers[member].receive_weights(orders[member], version=version)
            return _receipts(serial, shelf, ranks[member])

        def give_up(answer: "Future[list[Receipt]]") -> None:
            if answer.exception():
                shelf.put(abort_key(serial), "")

        answers = {member: self._threads.submit(carry_out, member) for member in receivers}
        # At once: a rank of the trainer that waits for this engine keeps the others waiting, too.
        for answer in answers.values():
            answer.add_done_callback(give_up)
        try:
            self.run(answers, transfer, deadline)
        except MemberError as error:
            # A GPU that waits for bytes waits for ever; its rank looks here, and gives up.
            shelf.put(abort_key(serial), "")
            wait(answers.values(), timeout=_GRACE_S)
            raise MemberError(_blame(error.reasons, answers)) from error
        return {member: answer.result() for member, answer in answers.items()}


def raise_refusals(replies: Replies) -> None:
    if reasons := _refusals(replies):
        raise MemberError(reasons)


def _refusals(replies: Replies) -> dict[Member, str]:
    failed = {m: reply.exception() for m, reply in replies.items() if reply.done()}
    return {member: str(error) for member, error in failed.items() if error}


def _blame(reasons: dict[Member, str], replies: Replies) -> dict[Member, str]:
    """Returns the members that caused a failure, with their reasons.

    A member that fails makes all others give up, and these may report first. So a member that gave
    up is blamed only if no other member failed or is silent.
    """
    known = reasons | _refusals(replies)
    own = {member: why for member, why in known.items() if not _gave_up(why)}
    silent = [member for member, reply in replies.items() if not reply.done()]
    return own or dict.fromkeys(silent, "did not answer when others gave up") or reasons


def _gave_up(error: str) -> bool:
    """Whether a rank ended only because another rank failed."""
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


class SentDigests(NamedTuple):
    """Digests of the weights that the trainer sent."""

    fingerprints: Sequence[int] = ()
    """One number for each bucket or file, in order."""
    by_name: str = ""


class DigestComparison(NamedTuple):
    """Digests of one version, as trainer and engines hold it."""

    trainer: str
    """One for each way in which engines report."""
    members: dict[str, str]
    equal: bool


def compare(
    updated: Engines, sent: SentDigests, receipts: Mapping[Member, Sequence[Receipt]]
) -> DigestComparison:
    """Compares the weights of the engines just updated with those sent.

    Engines with receipts have compared every slice of their parameters with the bytes they
    received, so only these bytes are compared here. Embedded engines digest their weights by name.
    """
    expected, held = {}, {}
    for member, receiver in updated.items():
        if member in receipts:
            expected[member.id] = _digest_of(sent.fingerprints)
            held[member.id] = _of_receipts(receipts[member])
        elif sent.by_name:
            expected[member.id], held[member.id] = sent.by_name, receiver.checksum()
    trainer = " ".join(sorted(set(expected.values())))
    return DigestComparison(trainer, dict(sorted(held.items())), held == expected)


def _of_receipts(ranks: Iterable[Receipt]) -> str:
    """Returns the digest that all ranks agree on; else what is wrong."""
    ranks = list(ranks)
    if errors := [receipt.error for receipt in ranks if receipt.error]:
        return errors[0]
    wrong = sum(receipt.differing for receipt in ranks)
    if wrong:
        return f"{wrong} slices differ from what was received"
    digests = {_digest_of(receipt.fingerprints) for receipt in ranks}
    return digests.pop() if len(digests) == 1 else "the ranks received different bytes"


def _digest_of(fingerprints: Iterable[int]) -> str:
    return hashlib.sha256(repr(list(fingerprints)).encode()).hexdigest()


Give = Callable[[Iterator[tuple[str, Tensor]], Collection[int]], None]
"""Gives this rank's part of a version: tensors, and the numbers of the buckets to skip."""


class Rest(NamedTuple):
    """Order to leave the weights where they are."""


class Serve(NamedTuple):
    way: str
    skipped: tuple[int, ...] = ()


class Write(NamedTuple):
    name: str


class TrainerRanks:
    """One rank. Rank 0 gives one order per publication; the others call `publish`."""

    def __init__(self, world: World, snapshots: SnapshotWriter, others: Mapping[str, Give]) -> None:
        """Every rank makes one.

        Args:
            others: gives this rank's part in every way that rank 0 may serve; unused on rank 0.
        """
        self._world, self._snapshots, self._others = world, snapshots, others

    def publish(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        match self._world.bcast(None):
            case Serve(way, skipped):
                self._others[way](tensors, skipped)
            case Write(name):
                with suppress(SnapshotError):  # rank 0 says so
                    self._snapshots.write(name, tensors)

    def tell(self, task: Rest | Serve) -> None:
        self._world.bcast(task)

    def write_snapshot(
        self, version: int, tensors: Iterator[tuple[str, Tensor]], *, in_use: Collection[Path]
    ) -> Snapshot:
        """Orders a snapshot and writes it together with the other ranks.

        Args:
            tensors: rank 0's stream of the weights.

        Raises:
            SnapshotError: it could not be written; nothing of it remains.
        """
        try:
            name = self._snapshots.begin(version, in_use=in_use)
        except SnapshotError:
            self.tell(Rest())
            raise
        self._world.bcast(Write(name))
        try:
            return self._snapshots.finish(name, self._snapshots.write(name, tensors))
        except SnapshotError:
            self._snapshots.discard(name)
            raise


Way = Literal["lanes", "collective", "files"]
WAYS: tuple[Way, ...] = get_args(Way)
"""Fastest first."""


@dataclass(frozen=True)
class Delivery:
    """Outcome for one version. Members it does not name hold a part of the weights, and need all of
    them again."""

    taken: Engines = field(default_factory=dict)
    """Members that hold it; they are paused unless `resumed`."""
    failed: dict[Member, str] = field(default_factory=dict)
    receipts: Receipts = field(default_factory=dict)
    """Receipts of members that take a version in one call."""
    sent: SentDigests = field(default_factory=SentDigests)
    """The digests to compare `receipts` with."""
    invited: Mapping[str, str] = field(default_factory=dict)
    """Member id -> how it was invited into a group that was formed for this version."""
    resumed: bool = False
    """Whether members in `taken` have resumed already."""
    begun: Sequence[Member] = ()
    """Members that load it in the background; see `files.Loads`."""


class Update(NamedTuple):
    """A version of the weights on its way to engines."""

    version: int
    outgoing: Outgoing
    timers: Timers
    """Get what engines wait for: `pause`, `wire` or `load`, and more; and `gather` or `write`."""
    check: bool
    """Whether receivers report digests afterwards, where they can."""


class Transport:
    """A way to bring weights to engines. Lives in rank 0 of the trainer, across updates."""

    def stage(self, update: Update) -> None:
        """Does the work that needs no paused engine.

        Raises:
            SnapshotError: this transport cannot be used at present.
        """
        raise NotImplementedError

    def deliver(self, live: Engines, update: Update) -> Delivery:
        """Pauses members, at least one, in place and gives them what was staged. The caller resumes
        them."""
        raise NotImplementedError

    def leaves_receipts(self, member: Member) -> bool:
        return member.takes_orders

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Whether all of them hold the buckets without trained weights, so that these can be
        skipped."""
        return False

    def settle(self, outgoing: Outgoing) -> None:
        """Ends a publication, whatever its outcome; drains the stream if it was begun."""

    def close(self) -> None:
        """Releases what engines hold together with this trainer."""


class JointTransport(Transport):
    """Sends a version to all members or to none: if one fails, the others hold a part."""

    def __init__(self, way: Way, threads: ThreadPoolExecutor, ranks: TrainerRanks) -> None:
        self._way, self._threads, self._ranks = way, threads, ranks

    def stage(self, update: Update) -> None:
        self._ranks.tell(Serve(self._way, update.outgoing.skipped))
        with update.timers("gather"):
            update.outgoing.prefetch()

    def deliver(self, live: Engines, update: Update) -> Delivery:
        try:
            receipts = self.send(live, update)
        except MemberError as error:
            self.close()
            return Delivery(failed=behind(self._threads, live, error))
        outgoing = update.outgoing
        sent = SentDigests(outgoing.fingerprints, outgoing.by_name)
        return Delivery(live, receipts=receipts, sent=sent)

    def send(self, live: Engines, update: Update) -> Receipts:
        """Does as `deliver`.

        Returns:
            The receipts of members that take a version in one call.

        Raises:
            MemberError: some failed.
        """
        raise NotImplementedError


def behind(threads: ThreadPoolExecutor, live: Engines, error: MemberError) -> dict[Member, str]:
    """Returns the members to blame for a failed update; the others get it in the next attempt.

    A member that dies or hangs makes the others fail as well, and these may report first. So a
    member that does not answer is blamed before any other.
    """
    health = threads.map(lambda receiver: receiver.health(HEALTH_S), live.values())
    silent = [member for member, ok in zip(live, health, strict=True) if not ok]
    blamed = [member for member in live if member in error.reasons]
    return {member: error.reasons.get(member, "does not answer") for member in silent or blamed}


def call_timeout_s(timeout_s: float) -> float:
    """Returns the timeout of a call within an update. It is longer than the update's own deadline,
    at which all members are checked, so that blame does not depend on which call ends first."""
    return timeout_s + _CALL_GRACE_S


def each(
    threads: ThreadPoolExecutor,
    receivers: Engines,
    call: Callable[[EngineClient], None],
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[Engines, dict[Member, str]]:
    """Calls all receivers at once; returns those that succeeded, and the errors of the others."""
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
    """Calls all members at once; returns the answers, and the errors of the others.

    Args:
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
