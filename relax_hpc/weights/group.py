"""The communicator of the trainer and a fixed set of engines."""

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol

from torch.distributed import DistError

from relax_hpc.comm.broadcast import BroadcastGroup, Transfer, Transport, open_store
from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import PLAN, Order, Receipt, Task, abort_key, key_of
from relax_hpc.comm.world import node_address
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.members import Member
from relax_hpc.weights.staging import Outgoing

_GRACE_S = 2.0
"""When a transfer has failed, what engines get to say why."""


class Receiver(Protocol):
    """What publishing needs of an engine's client; every method raises EngineError."""

    def health(self, timeout_s: float) -> bool: ...
    def version(self) -> int: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def checksum(self) -> str: ...
    def init_weights_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None: ...
    def destroy_weights_group(self, name: str) -> None: ...
    def update_weights_from_disk(self, path: str, version: int) -> None: ...
    def receive_weights(self, order: Order, *, num_ranks: int, version: int) -> None:
        """Of engines that take a version in one call."""
        ...

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
        last: bool,
    ) -> None:
        """Of engines that take a call per bucket."""
        ...


class MemberError(EngineError):
    """Some members did not do their part; the others' weights may be undefined as well."""

    def __init__(self, reasons: dict[Member, str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(f"{member.id}: {why}" for member, why in reasons.items()))


class MemberGroup:
    """Rank 0 is the trainer; the members follow in the order of `receivers`."""

    def __init__(
        self,
        receivers: dict[Member, Receiver],
        name: str,
        group: BroadcastGroup,
        config: WeightsConfig,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.receivers, self.name, self._group = receivers, name, group
        self._config, self._threads = config, threads
        self._is_prepared = False

    @classmethod
    def form(
        cls,
        receivers: dict[Member, Receiver],
        plan: BucketPlan,
        config: WeightsConfig,
        backend: Transport,
        threads: ThreadPoolExecutor,
    ) -> "MemberGroup":
        """Joins trainer and members. The engines block while they join, so all are asked at once.

        Raises:
            MemberError: those that refused, or did not join within `config.timeout_s`.
        """
        size = 1 + sum(member.num_ranks for member in receivers)
        host, timeout_s = node_address(), config.timeout_s
        store = open_store(host, size, timeout_s=timeout_s)
        # An engine takes a name once, and outlives trainers.
        name = f"relax-weights-{uuid.uuid4().hex[:8]}"
        offsets = itertools.accumulate((m.num_ranks for m in receivers), initial=1)
        joins = {
            member: threads.submit(
                receiver.init_weights_group, host, store.port, offset, size, name, backend
            )
            for (member, receiver), offset in zip(receivers.items(), offsets, strict=False)
        }
        try:
            group = BroadcastGroup(
                host, store.port, 0, size, name, backend, store=store, timeout_s=timeout_s
            )
        except RuntimeError as error:
            _raise_refusals(joins)
            late = [member for member, join in joins.items() if not join.done()] or joins
            raise MemberError(dict.fromkeys(late, f"did not join the group: {error}")) from error
        wait(joins.values(), timeout=timeout_s)
        _raise_refusals(joins)
        group.put(PLAN, plan.to_json())
        return cls(receivers, name, group, config, threads)

    def record(self) -> dict[str, object]:
        """The topology, for whoever reads the run directory."""
        return {
            "name": self.name,
            "world_size": self._group.size,
            "members": [
                {"id": m.id, "epoch": m.epoch, "rank_offset": offset, "num_ranks": m.num_ranks}
                for m, offset in self._offsets()
            ],
        }

    def send(
        self, version: int, outgoing: Outgoing, timers: Timers, *, check: bool
    ) -> dict[Member, list[Receipt]]:
        """Pauses the members in place and sends them `version`; resuming is left to the caller.

        Args:
            version: of the policy.
            outgoing: nothing of it was sent yet.
            timers: get `pause`, `prepare` (once) and `wire`.
            check: whether receivers tell what they hold afterwards, where they can.

        Returns:
            What the ranks of those answered that take a version in one call.

        Raises:
            MemberError: who failed, or did not answer by the deadline. The group is of no use then.
        """
        deadline = time.monotonic() + self._config.timeout_s
        with timers("pause"):
            pauses = {m: self._threads.submit(r.pause) for m, r in self.receivers.items()}
            self._exchange(pauses, lambda _: None, deadline)
        direct = {m: r for m, r in self.receivers.items() if m.takes_orders}
        if direct and not self._is_prepared:
            with timers("prepare"):
                self._order("prepare", direct, version, outgoing.warm_up, deadline)
            self._is_prepared = True
        with timers("wire"):
            if direct:
                task: Task = "check" if check else "receive"
                return self._order(task, direct, version, outgoing.send, deadline)
            sending = outgoing.send(self._group)
            for bucket in outgoing.plan.buckets:
                last = bucket is outgoing.plan.buckets[-1]
                replies = self._ask_for(bucket, version, last=last)
                self._exchange(
                    replies, lambda give_up: next(sending).wait(deadline, give_up), deadline
                )
        return {}

    def close(self) -> None:
        """Tells the members to leave, without waiting for any: some may be dead."""
        for receiver in self.receivers.values():
            self._threads.submit(receiver.destroy_weights_group, self.name)
        self._group.close()

    def _order(
        self,
        task: Task,
        receivers: dict[Member, Receiver],
        version: int,
        send: Callable[[BroadcastGroup], Iterator[Transfer]],
        deadline: float,
    ) -> dict[Member, list[Receipt]]:
        order = Order(uuid.uuid4().hex[:8], self.name, task, self._config.timeout_s)

        def transfer(give_up: Callable[[], None]) -> None:
            for sent in send(self._group):
                if not self._group.is_asynchronous:
                    sent.wait(deadline, give_up)
            sent.wait(deadline, give_up)

        replies = {
            member: self._threads.submit(
                receiver.receive_weights, order, num_ranks=member.num_ranks, version=version
            )
            for member, receiver in receivers.items()
        }
        try:
            self._exchange(replies, transfer, deadline)
        except MemberError as error:
            # A GPU that waits for bytes waits for ever; its rank looks here, and gives up.
            self._group.put(abort_key(order.serial), "")
            wait(replies.values(), timeout=_GRACE_S)
            answered = [m for m, reply in replies.items() if reply.done() and not reply.exception()]
            told = self._receipts(order, answered)
            raise MemberError(error.reasons | _errors(told)) from error
        receipts = self._receipts(order, list(receivers))
        if errors := _errors(receipts):
            raise MemberError(errors)
        return receipts

    def _receipts(self, order: Order, members: Sequence[Member]) -> dict[Member, list[Receipt]]:
        """Of members that have answered, so they are there."""
        found = dict[Member, list[Receipt]]()
        for member, offset in self._offsets():
            if member in members:
                keys = [key_of(order.serial, offset + rank) for rank in range(member.num_ranks)]
                try:
                    texts = [self._group.take(key, timeout_s=_GRACE_S) for key in keys]
                except DistError:
                    found[member] = [Receipt(error="a rank did not say what it did")]
                else:
                    found[member] = [Receipt.from_json(text) for text in texts]
        return found

    def _exchange(
        self,
        replies: dict[Member, "Future[None]"],
        transfer: Callable[[Callable[[], None]], None],
        deadline: float,
    ) -> None:
        """Does a transfer while the members answer.

        Raises:
            MemberError: those that refused, or if nobody did, those that did not answer in time.
        """
        failure = ""
        try:
            transfer(lambda: _raise_refusals(replies))
            wait(replies.values(), timeout=deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
        except (RuntimeError, TimeoutError) as error:
            failure = str(error)
            wait(replies.values(), timeout=_GRACE_S, return_when=FIRST_EXCEPTION)
        _raise_refusals(replies)
        late = [member for member, reply in replies.items() if not reply.done()]
        if late or failure:
            reason = f"no answer within {self._config.timeout_s:.0f} s" if late else failure
            raise MemberError(dict.fromkeys(late or replies, reason))

    def _ask_for(
        self, bucket: Sequence[Spec], version: int, *, last: bool
    ) -> dict[Member, "Future[None]"]:
        names = [spec.name for spec in bucket]
        dtypes = [str(spec.dtype).removeprefix("torch.") for spec in bucket]
        shapes = [list(spec.shape) for spec in bucket]
        return {
            member: self._threads.submit(
                receiver.update_weights, names, dtypes, shapes,
                group=self.name, version=version, last=last,
            )
            for member, receiver in self.receivers.items()
        }  # fmt: skip

    def _offsets(self) -> list[tuple[Member, int]]:
        """Members and the first of their ranks."""
        offsets = itertools.accumulate((m.num_ranks for m in self.receivers), initial=1)
        return list(zip(self.receivers, offsets, strict=False))


def _raise_refusals(replies: dict[Member, "Future[None]"]) -> None:
    """Raises MemberError if a call has failed already."""
    failed = {m: reply.exception() for m, reply in replies.items() if reply.done()}
    reasons = {member: str(error) for member, error in failed.items() if error}
    if reasons:
        raise MemberError(reasons)


def _errors(receipts: dict[Member, list[Receipt]]) -> dict[Member, str]:
    """The first error of each member that had one."""
    found = {m: next((r.error for r in ranks if r.error), "") for m, ranks in receipts.items()}
    return {member: error for member, error in found.items() if error}
