"""Sends weights by broadcast, over one communicator of the trainer and all its engines.

The communicator is kept between updates, for as long as the set of engines stays the same.
"""

import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.inference.members import Engines, Key, Member
from relax_hpc.runtime.comm.address import node_address
from relax_hpc.runtime.comm.bucket import BucketPlan, Sending, Spec, Wire
from relax_hpc.runtime.comm.orders import PLAN, Order, Task
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, GroupBackend, open_store
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.http import HttpCarrier
from relax_hpc.weights.meeting.invitation import Carrier, Invitation, invite
from relax_hpc.weights.staging import Outgoing, Wait
from relax_hpc.weights.transport import (
    Delivery,
    Exchange,
    JointTransport,
    MemberError,
    Receipts,
    Replies,
    TrainerRanks,
    Update,
    call_timeout_s,
    raise_refusals,
)

Send = Callable[[Wire, Wait], Iterator[Sending]]
"""See `Outgoing.send`."""


class MemberGroup:
    """A communicator of the trainer, rank 0, and members, in the order of `receivers`."""

    def __init__(
        self,
        receivers: Engines,
        name: str,
        group: BroadcastGroup,
        config: WeightsConfig,
        threads: ThreadPoolExecutor,
        taught: set[Key],
    ) -> None:
        """Keeps `taught`, the members that know where weights go, up to date."""
        self.receivers, self.name, self._group = receivers, name, group
        self._config, self._threads, self._taught = config, threads, taught
        self._exchange = Exchange(threads, config.advanced.timeout_s)
        self._is_prepared = False
        self.ways = dict[str, str]()
        """Id -> how the member was invited, and why not better."""
        self.is_served = False
        """Whether every member received a whole version."""

    @classmethod
    def form(
        cls,
        receivers: Engines,
        plan: BucketPlan,
        config: WeightsConfig,
        backend: GroupBackend,
        threads: ThreadPoolExecutor,
        taught: set[Key],
        *,
        carriers: Sequence[Carrier] = (),
        version: int = 0,
    ) -> "MemberGroup":
        """Joins trainer and members. Engines block while they join, so all are called at once.

        Raises:
            MemberError: members that refused, or did not join within `config.advanced.timeout_s`.
        """
        size = 1 + sum(member.num_ranks for member in receivers)
        host, timeout_s = node_address(), config.advanced.timeout_s
        store = open_store(host, size, timeout_s=timeout_s)
        # An engine takes a name once, and outlives trainers.
        name = f"relax-weights-{uuid.uuid4().hex[:8]}"
        offsets = itertools.accumulate((m.num_ranks for m in receivers), initial=1)
        digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
        invitations = {
            m: Invitation(
                m.id, m.task, m.start, name, host, store.port, size, offset, m.num_ranks, backend,
                digest, version,
            )
            for m, offset in zip(receivers, offsets, strict=False)
        }  # fmt: skip
        carriers = [*carriers, HttpCarrier(threads)]
        joins, ways = invite(carriers, receivers, invitations, timeout_s)
        try:
            wire = BroadcastGroup(
                host, store.port, 0, size, name, backend, store=store, timeout_s=timeout_s
            )
        except RuntimeError as error:
            raise_refusals(joins)
            late = [member for member, join in joins.items() if not join.done()] or joins
            raise MemberError(dict.fromkeys(late, f"did not join the group: {error}")) from error
        group = cls(receivers, name, wire, config, threads, taught)
        group.ways = ways
        try:
            _wait_for(joins, timeout_s)
        except MemberError:
            group.close()
            raise
        wire.put(PLAN, plan.to_json())
        return group

    def record(self) -> dict[str, object]:
        """Returns the topology, for readers of the run directory."""
        return {
            "name": self.name,
            "world_size": self._group.size,
            "members": [
                {
                    "id": m.id,
                    "start": m.start,
                    "rank_offset": offset,
                    "num_ranks": m.num_ranks,
                    "invited_by": self.ways.get(m.id),
                }
                for m, offset in self._offsets()
            ],
        }

    def send(self, update: Update) -> Receipts:
        """Pauses the members in place and sends them the version. The caller resumes them.

        Args:
            update: its outgoing is not started yet; its timers get `learn` (if members joined
                others), `pause`, `prepare` (once) and `wire`.

        Returns:
            The receipts of members that take a version in one call.

        Raises:
            MemberError: members that failed or missed the deadline. The group is unusable then.
        """
        deadline = time.monotonic() + self._config.advanced.timeout_s
        direct = {m: r for m, r in self.receivers.items() if m.takes_orders}
        ready, timers = set[Member](), update.timers
        if not self._is_prepared:
            ready = self._teach_newcomers(direct, update, deadline)
        with timers("pause"):
            self._exchange.pause(
                {m: r for m, r in self.receivers.items() if m not in ready}, deadline
            )
        if direct and not self._is_prepared:
            with timers("prepare"):
                self._prepare(direct, ready, update, deadline)
        with timers("wire"):
            receipts = Receipts()
            if direct:
                task: Task = "check" if update.check else "receive"
                send, skipped = update.outgoing.send, update.outgoing.skipped
                receipts = self._order(task, direct, update.version, send, deadline, skipped)
            else:
                self._send_by_name(update, deadline)
        self.is_served = True
        return receipts

    def close(self) -> None:
        """Tells the members to leave. Waits for none of them, since some may be dead."""
        for receiver in self.receivers.values():
            self._threads.submit(receiver.destroy_weights_group, self.name)
        self._group.close()

    def _teach_newcomers(self, direct: Engines, update: Update, deadline: float) -> set[Member]:
        """Teaches new members where weights go, while the others sample on.

        Returns:
            The members it paused for that.
        """
        newcomers = {m: r for m, r in direct.items() if m.key not in self._taught}
        if not 0 < len(newcomers) < len(direct):
            return set()
        with update.timers("learn"):
            self._exchange.pause(newcomers, deadline)
            self._order("learn", newcomers, update.version, _nothing, deadline)
        return set(newcomers)

    def _prepare(
        self, direct: Engines, ready: set[Member], update: Update, deadline: float
    ) -> None:
        """Teaches members that are not ready, then makes the first use of the communicator.

        With NCCL the first use blocks until all ranks are there and cannot be aborted. So a member
        that cannot take the weights has to report it before.
        """
        if others := {m: r for m, r in direct.items() if m not in ready}:
            self._order("learn", others, update.version, _nothing, deadline)
        self._order("prepare", direct, update.version, update.outgoing.warm_up, deadline)
        self._taught |= {member.key for member in direct}
        self._is_prepared = True

    def _send_by_name(self, update: Update, deadline: float) -> None:
        sending, buckets = update.outgoing.send(self._group), update.outgoing.buckets
        for bucket in buckets:
            replies = self._ask_for(bucket, update.version, last=bucket is buckets[-1])
            self._exchange.run(
                replies, lambda give_up: next(sending).wait(deadline, give_up), deadline
            )

    def _order(
        self,
        task: Task,
        receivers: Engines,
        version: int,
        send: Send,
        deadline: float,
        skipped: tuple[int, ...] = (),
    ) -> Receipts:
        timeout_s = call_timeout_s(self._config.advanced.timeout_s)
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
        return self._exchange.carry_out(
            orders, receivers, version, ranks, transfer, deadline, self._group
        )

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
        offsets = itertools.accumulate((m.num_ranks for m in self.receivers), initial=1)
        return list(zip(self.receivers, offsets, strict=False))


def _nothing(*_: object) -> Iterator[Sending]:
    return iter(())


def _wait_for(joins: Replies, timeout_s: float) -> None:
    """Waits for the joins: NCCL returns a communicator at once, whoever joins it.

    Raises:
        MemberError: members that refused, or did not join in time.
    """
    wait(joins.values(), timeout=timeout_s, return_when=FIRST_EXCEPTION)
    raise_refusals(joins)
    if late := [member for member, join in joins.items() if not join.done()]:
        raise MemberError(dict.fromkeys(late, f"did not join the group within {timeout_s:.0f} s"))


class CollectiveTransport(JointTransport):
    """Brings weights by broadcast."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        threads: ThreadPoolExecutor,
        ranks: TrainerRanks,
        plan: BucketPlan,
        backend: GroupBackend,
        carriers: Sequence[Carrier] = (),
    ) -> None:
        super().__init__("collective", threads, ranks)
        self._carriers = carriers
        self._config, self._paths, self._plan, self._backend = config, paths, plan, backend
        self._group: MemberGroup | None = None
        self._taught = set[Key]()

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Whether they are the group and hold a whole version; a new group is sent everything."""
        group = self._group
        return group is not None and group.is_served and list(group.receivers) == list(members)

    def deliver(self, live: Engines, update: Update) -> Delivery:
        if self._group and list(self._group.receivers) != list(live):
            self.close()
        if self._group is None and update.outgoing.skipped:  # somebody has gone since it was staged
            return Delivery()
        before, delivery = self._group, super().deliver(live, update)
        if self._group is None or self._group is before:
            return delivery
        return replace(delivery, invited=self._group.ways)

    def send(self, live: Engines, update: Update) -> Receipts:
        if self._group is None:
            with update.timers("join"):
                self._group = self._form(live, update.version)
        return self._group.send(update)

    def settle(self, outgoing: Outgoing) -> None:
        """Drains the gather, since the other ranks feed it."""
        outgoing.drain()

    def close(self) -> None:
        if self._group:
            self._group.close()
            self._group = None

    def _form(self, live: Engines, version: int) -> MemberGroup:
        group = MemberGroup.form(
            live,
            self._plan,
            self._config,
            self._backend,
            self._threads,
            self._taught,
            carriers=self._carriers,
            version=version,
        )
        write_json(self._paths.rendezvous("weights"), group.record())
        return group
