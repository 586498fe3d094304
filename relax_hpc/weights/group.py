"""The communicator of the trainer and a fixed set of engines."""

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from relax_hpc.comm.address import node_address
from relax_hpc.comm.broadcast import BroadcastGroup, Transport
from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import PLAN, Order, Receipt, Task
from relax_hpc.comm.torch_store import open_store
from relax_hpc.comm.wire import Sending, Wire
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.exchange import (
    Exchange,
    MemberError,
    Replies,
    give_orders,
    raise_refusals,
)
from relax_hpc.weights.staging import Outgoing, Wait
from relax_hpc.weights.transport import call_timeout_s

Send = Callable[[Wire, Wait], Iterator[Sending]]
"""See `Outgoing.send`."""
Start = tuple[str, str]
"""A member and its start: what is said of an engine until it is started again."""


class MemberGroup:
    """A communicator of the trainer, rank 0, and members, in the order of `receivers`."""

    def __init__(
        self,
        receivers: dict[Member, EngineControl],
        name: str,
        group: BroadcastGroup,
        config: WeightsConfig,
        threads: ThreadPoolExecutor,
        taught: set[Start],
    ) -> None:
        """`taught` are those who know where weights go; it is kept up to date."""
        self.receivers, self.name, self._group = receivers, name, group
        self._config, self._threads, self._taught = config, threads, taught
        self._exchange = Exchange(config.timeout_s)
        self._is_prepared = False
        self.is_served = False
        """Whether all members were sent a whole version."""

    @classmethod
    def form(
        cls,
        receivers: dict[Member, EngineControl],
        plan: BucketPlan,
        config: WeightsConfig,
        backend: Transport,
        threads: ThreadPoolExecutor,
        taught: set[Start],
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
            wire = BroadcastGroup(
                host, store.port, 0, size, name, backend, store=store, timeout_s=timeout_s
            )
        except RuntimeError as error:
            raise_refusals(joins)
            late = [member for member, join in joins.items() if not join.done()] or joins
            raise MemberError(dict.fromkeys(late, f"did not join the group: {error}")) from error
        group = cls(receivers, name, wire, config, threads, taught)
        try:
            _wait_for(joins, timeout_s)
        except MemberError:
            group.close()
            raise
        wire.put(PLAN, plan.to_json())
        return group

    def record(self) -> dict[str, object]:
        """The topology, for whoever reads the run directory."""
        return {
            "name": self.name,
            "world_size": self._group.size,
            "members": [
                {"id": m.id, "start": m.start, "rank_offset": offset, "num_ranks": m.num_ranks}
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
            timers: get `learn` (if somebody has joined others), `pause`, `prepare` (once), `wire`.
            check: whether receivers tell what they hold afterwards, where they can.

        Returns:
            What the ranks of those answered that take a version in one call.

        Raises:
            MemberError: who failed, or did not answer by the deadline. The group is of no use then.
        """
        deadline = time.monotonic() + self._config.timeout_s
        direct = {m: r for m, r in self.receivers.items() if m.takes_orders}
        ready = set[Member]()
        if not self._is_prepared:
            ready = self._teach_newcomers(direct, version, timers, deadline)
        with timers("pause"):
            self._pause({m: r for m, r in self.receivers.items() if m not in ready}, deadline)
        if direct and not self._is_prepared:
            with timers("prepare"):
                self._prepare(direct, ready, version, outgoing, deadline)
        with timers("wire"):
            receipts = dict[Member, list[Receipt]]()
            if direct:
                task: Task = "check" if check else "receive"
                skipped = outgoing.skipped
                receipts = self._order(task, direct, version, outgoing.send, deadline, skipped)
            else:
                self._send_by_name(version, outgoing, deadline)
        self.is_served = True
        return receipts

    def close(self) -> None:
        """Tells the members to leave, without waiting for any: some may be dead."""
        for receiver in self.receivers.values():
            self._threads.submit(receiver.destroy_weights_group, self.name)
        self._group.close()

    def _teach_newcomers(
        self,
        direct: dict[Member, EngineControl],
        version: int,
        timers: Timers,
        deadline: float,
    ) -> set[Member]:
        """Lets those find the places of weights who do not know them, while others sample on.

        Returns:
            Whom it has paused for that.
        """
        newcomers = {m: r for m, r in direct.items() if _start(m) not in self._taught}
        if not 0 < len(newcomers) < len(direct):
            return set()
        with timers("learn"):
            self._pause(newcomers, deadline)
            self._order("learn", newcomers, version, _nothing, deadline)
        return set(newcomers)

    def _prepare(
        self,
        direct: dict[Member, EngineControl],
        ready: set[Member],
        version: int,
        outgoing: Outgoing,
        deadline: float,
    ) -> None:
        """Lets those learn who are not ready, and then all use the wire once.

        With NCCL the first use of it waits until all are there, and nobody can end that: who cannot
        take the weights has to have said so before.
        """
        if others := {m: r for m, r in direct.items() if m not in ready}:
            self._order("learn", others, version, _nothing, deadline)
        self._order("prepare", direct, version, outgoing.warm_up, deadline)
        self._taught |= set(map(_start, direct))
        self._is_prepared = True

    def _pause(self, receivers: dict[Member, EngineControl], deadline: float) -> None:
        pauses = {m: self._threads.submit(r.pause) for m, r in receivers.items()}
        self._exchange.run(pauses, lambda _: None, deadline)

    def _send_by_name(self, version: int, outgoing: Outgoing, deadline: float) -> None:
        sending, buckets = outgoing.send(self._group), outgoing.buckets
        for bucket in buckets:
            replies = self._ask_for(bucket, version, last=bucket is buckets[-1])
            self._exchange.run(
                replies, lambda give_up: next(sending).wait(deadline, give_up), deadline
            )

    def _order(
        self,
        task: Task,
        receivers: dict[Member, EngineControl],
        version: int,
        send: Send,
        deadline: float,
        skipped: tuple[int, ...] = (),
    ) -> dict[Member, list[Receipt]]:
        timeout_s = call_timeout_s(self._config.timeout_s)
        order = Order(uuid.uuid4().hex[:8], self.name, task, timeout_s, skipped=skipped)

        def transfer(give_up: Callable[[], None]) -> None:
            sent = None
            for sent in send(self._group, lambda sending: sending.wait(deadline, give_up)):
                if not self._group.is_asynchronous:
                    sent.wait(deadline, give_up)
            if sent:
                sent.wait(deadline, give_up)

        orders = {member: [order] * member.num_ranks for member in receivers}
        ranks = {m: range(first, first + m.num_ranks) for m, first in self._offsets()}
        answers = give_orders(self._threads, receivers, orders, version, self._group, ranks)
        return self._exchange.carry_out(order.serial, answers, transfer, deadline, self._group)

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


def _nothing(*_: object) -> Iterator[Sending]:
    return iter(())


def _wait_for(joins: Replies, timeout_s: float) -> None:
    """With NCCL there is a communicator at once, whoever joins it.

    Raises:
        MemberError: those that refused, or did not join in time.
    """
    wait(joins.values(), timeout=timeout_s, return_when=FIRST_EXCEPTION)
    raise_refusals(joins)
    if late := [member for member, join in joins.items() if not join.done()]:
        raise MemberError(dict.fromkeys(late, f"did not join the group within {timeout_s:.0f} s"))


def _start(member: Member) -> Start:
    return member.id, member.start
