"""Weights to engines on the trainer's own GPUs: every rank gives its neighbour what it was given.

Engine e's rank t sits on the GPU of the trainer's rank e x ranks + t. Each rank of the trainer is
given the whole stream of weights, so no bucket crosses a GPU.
"""

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.comm.lanes import Giver, NoWire, Store
from relax_hpc.comm.orders import PLAN, Order, Receipt, Task, abort_key
from relax_hpc.comm.wire import Wire
from relax_hpc.comm.world import World
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.exchange import Exchange, MemberError, give_orders
from relax_hpc.weights.ranks import Serve, TrainerRanks
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import Delivery, behind, call_timeout_s
from relax_hpc.weights.verify import Sent

_BUFFERS = 2
_POLL_S = 1e-3


@dataclass
class _Word:
    """A message of rank 0 to the other ranks about an update."""

    lanes: list[int]
    """The lanes that are used; none if no engine is to be given anything."""
    serial: str = ""


class LaneLink:
    """One rank's part; made by all ranks of the trainer at once, and kept."""

    def __init__(
        self, world: World, plan: BucketPlan, device: torch.device, config: WeightsConfig
    ) -> None:
        self.config, self.lane = config, world.rank
        self.buffers = Buffers(plan, device, count=_BUFFERS)
        self.store = Store.of_trainer(world, timeout_s=config.timeout_s)
        self.giver = Giver(self.store, world.rank, self.buffers.shared())
        if world.rank == 0:
            self.store.put(PLAN, plan.to_json())
        world.barrier()
        self._others, self._count = range(1, world.size), 0

    def tell(self, word: _Word) -> None:
        """Rank 0 says what the others do in this update."""
        for lane in self._others:
            self.store.put(f"word/{self._count}/{lane}", json.dumps(asdict(word)))
        self._count += 1

    def hear(self) -> _Word:
        """Waits for the message of rank 0.

        Raises:
            PeerTimeoutError: nothing, although it has had time to wait for every engine.
        """
        key, limit_s = f"word/{self._count}/{self.lane}", 3 * self.config.timeout_s
        self._count += 1
        deadline = time.monotonic() + limit_s
        while not self.store.has(key):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"rank 0 of the trainer said nothing for {limit_s:.0f} s")
            time.sleep(_POLL_S)
        return _Word(**json.loads(self.store.take(key, timeout_s=self.config.timeout_s)))

    def give(
        self,
        serial: str,
        outgoing: Outgoing,
        wire: Wire,
        deadline: float,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Gives all buckets to the engine's rank beside this one, unless somebody gives up.

        Args:
            serial: of the order.
            outgoing: nothing of it was sent yet.
            wire: to that rank, if it has one.
            deadline: of time.monotonic().
            give_up: called again and again; what it raises ends it.
        """

        def check() -> None:
            give_up()
            if self.store.has(abort_key(serial)) or time.monotonic() > deadline:
                raise _GivenUpError

        self.giver.begin(serial, check)
        # Whoever gave up, or did not take a bucket, will be named by rank 0.
        with suppress(_GivenUpError):
            for sent in list(outgoing.send(wire)):
                sent.order_after()


class LaneGiver:
    """The part of a rank other than 0 in a publication."""

    def __init__(self, link: LaneLink, gather: Gather | None = None) -> None:
        """Takes link and gather as the publisher has them; the gather is one to all ranks."""
        self._link, self._gather = link, gather

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        skipped: Collection[int] = (),
    ) -> None:
        """Gives the engine's rank on this GPU the weights, if it is to have them."""
        link = self._link
        outgoing = Outgoing(link.buffers, tensors, self._gather, skipped=skipped)
        outgoing.prefetch()  # rank 0 does, and they bring the tensors together
        try:
            word = link.hear()
            if link.lane in word.lanes:
                deadline = time.monotonic() + link.config.timeout_s
                link.give(word.serial, outgoing, link.giver, deadline)
        finally:
            outgoing.drain()


class _GivenUpError(Exception):
    """Rank 0 gave the update up, or is dead."""


class LaneTransport:
    """See `transport.Transport`."""

    def __init__(self, link: LaneLink, threads: ThreadPoolExecutor, ranks: TrainerRanks) -> None:
        self._link, self._threads, self._ranks = link, threads, ranks
        self._exchange = Exchange(link.config.timeout_s)
        self._prepared = set[Member]()
        self._has_told = False

    def leaves_receipts(self, member: Member) -> bool:
        return True

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Never: engines that share GPUs lose all weights where they give memory back."""
        return False

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Fills the buffers."""
        self._ranks.tell(Serve("lanes"))
        with timers("gather"):
            outgoing.prefetch()

    def deliver(
        self,
        live: dict[Member, EngineControl],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """Gives the version to all of them or to none, like a broadcast."""
        deadline = time.monotonic() + self._link.config.timeout_s
        try:
            with timers("pause"):
                pauses = {m: self._threads.submit(r.pause) for m, r in live.items()}
                self._exchange.run(pauses, lambda _: None, deadline)
            if new := {m: r for m, r in live.items() if m not in self._prepared}:
                with timers("prepare"):
                    self._order("prepare", new, version, lambda serial, give_up: None, deadline)
                self._prepared |= new.keys()
            with timers("wire"):
                task: Task = "check" if check else "receive"

                def transfer(serial: str, give_up: Callable[[], None]) -> None:
                    self._give(live, serial, outgoing, give_up, deadline)

                receipts = self._order(task, live, version, transfer, deadline)
            return Delivery(live, {}, receipts, Sent(outgoing.fingerprints, outgoing.by_name))
        except MemberError as error:
            return Delivery({}, behind(self._threads, live, error), {}, Sent([], ""))

    def settle(self, outgoing: Outgoing) -> None:
        """Tells the other ranks that nobody is to be given anything, if nobody was."""
        if not self._has_told:
            self._link.tell(_Word([]))
        self._has_told = False
        outgoing.drain()

    def close(self) -> None:
        """Engines let go of the memory when they meet another trainer, or end."""

    def _give(
        self,
        live: dict[Member, EngineControl],
        serial: str,
        outgoing: Outgoing,
        give_up: Callable[[], None],
        deadline: float,
    ) -> None:
        lanes = [lane for member in live for lane in _lanes(member)]
        self._link.tell(_Word(lanes, serial))
        self._has_told = True
        wire = self._link.giver if self._link.lane in lanes else NoWire()
        self._link.give(serial, outgoing, wire, deadline, give_up)

    def _order(
        self,
        task: Task,
        receivers: dict[Member, EngineControl],
        version: int,
        transfer: Callable[[str, Callable[[], None]], None],
        deadline: float,
    ) -> dict[Member, list[Receipt]]:
        store, serial = self._link.store, uuid.uuid4().hex[:8]
        timeout_s = call_timeout_s(self._link.config.timeout_s)
        order = Order(serial, "", task, timeout_s, store.address)
        ranks = {member: _lanes(member) for member in receivers}
        orders = {m: [replace(order, lane=lane) for lane in ranks[m]] for m in receivers}
        return self._exchange.carry_out(
            serial,
            give_orders(self._threads, receivers, orders, version, store, ranks),
            lambda give_up: transfer(serial, give_up),
            deadline,
            store,
        )


def _lanes(member: Member) -> range:
    return range(member.lane, member.lane + member.num_ranks)
