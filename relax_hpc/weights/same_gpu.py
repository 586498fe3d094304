"""Serves engines on the trainer's own GPUs: each rank sends weights to the engines beside it.

Rank t of engine e has lane e x ranks + t. With k engines on a GPU, the trainer's rank r serves
lanes r x k to r x k + k - 1. Every rank of the trainer gets the whole stream of weights, so no
bucket crosses between GPUs.

Engines release their memory while the trainer trains. They take it back in the next publication:
first the memory of the weights, which are then updated, then that of the cache, which is empty.
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

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, PeerTimeoutError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import MEMORY, EngineRegistry, Engines, Member
from relax_hpc.runtime.comm.bucket import BucketPlan
from relax_hpc.runtime.comm.lanes import LaneSender, Store
from relax_hpc.runtime.comm.orders import PLAN, Order, Task, abort_key
from relax_hpc.runtime.comm.torch_group import start_store
from relax_hpc.runtime.comm.world import World
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import (
    Exchange,
    JointTransport,
    Receipts,
    TrainerRanks,
    Update,
    call_timeout_s,
    each,
)

_BUFFERS = 2
_POLL_S, _IDLE_POLL_S, _STARTS_POLL_S = 1e-3, 0.01, 0.1


@dataclass
class _Word:
    """Message of rank 0 to the other ranks about an update."""

    lanes: list[int]
    """Lanes in use; empty if no engine gets anything."""
    serial: str = ""


class LaneLink:
    """One rank's part. All ranks of the trainer make it at once, and keep it."""

    def __init__(
        self,
        world: World,
        plan: BucketPlan,
        device: torch.device,
        config: WeightsConfig,
        per_rank: int = 1,
    ) -> None:
        self.config, self._rank = config, world.rank
        self._lanes = range(world.rank * per_rank, (world.rank + 1) * per_rank)
        self.buffers = Buffers(plan, device, count=_BUFFERS)
        self.store = Store(start_store(world, timeout_s=config.advanced.timeout_s))
        self.sender = LaneSender(self.store, self._lanes, self.buffers.share())
        if world.rank == 0:
            self.store.put(PLAN, plan.to_json())
        world.barrier()
        self._others, self._count = range(1, world.size), 0

    def tell(self, word: _Word) -> None:
        """Rank 0: tells the others what to do in this update."""
        for rank in self._others:
            self.store.put(f"word/{self._count}/{rank}", json.dumps(asdict(word)))
        self._count += 1

    def hear(self) -> _Word:
        """Waits for the message of rank 0.

        Raises:
            PeerTimeoutError: none came in the time rank 0 needs to wait for every engine.
        """
        key, limit_s = f"word/{self._count}/{self._rank}", 3 * self.config.advanced.timeout_s
        self._count += 1
        deadline = time.monotonic() + limit_s
        while not self.store.has(key):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"rank 0 of the trainer said nothing for {limit_s:.0f} s")
            time.sleep(_POLL_S)
        return _Word(**json.loads(self.store.take(key, timeout_s=self.config.advanced.timeout_s)))

    def own(self, word: _Word) -> list[int]:
        """Returns the lanes of this rank that are in use."""
        return [lane for lane in word.lanes if lane in self._lanes]

    def give(
        self,
        word: _Word,
        outgoing: Outgoing,
        deadline: float,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Gives all buckets to the engine ranks on this GPU, unless somebody gives up.

        Args:
            outgoing: not started yet.
            deadline: of time.monotonic().
            give_up: polled during the transfer; an error it raises ends the transfer.
        """

        def check() -> None:
            give_up()
            if self.store.has(abort_key(word.serial)) or time.monotonic() > deadline:
                raise _GivenUpError

        self.sender.begin(word.serial, self.own(word), check)
        # Whoever gave up, or did not take a bucket, will be named by rank 0.
        with suppress(_GivenUpError):
            for sent in list(outgoing.send(self.sender)):
                sent.order_after()


def give_lane(
    link: LaneLink,
    gather: Gather | None,
    tensors: Iterator[tuple[str, Tensor]],
    skipped: Collection[int] = (),
) -> None:
    """Gives the weights to the engine ranks on this GPU that are to get them; on ranks other than
    0, with link and gather as the publisher has them."""
    outgoing = Outgoing(link.buffers, tensors, gather, skipped=skipped)
    outgoing.prefetch()  # rank 0 does, and they bring the tensors together
    try:
        word = link.hear()
        if link.own(word):
            deadline = time.monotonic() + link.config.advanced.timeout_s
            link.give(word, outgoing, deadline)
    finally:
        outgoing.drain()


class _GivenUpError(Exception):
    """Rank 0 gave up the update, or is dead."""


class LaneTransport(JointTransport):
    """Brings weights through shared GPU memory. Engines release it when they meet another trainer,
    or end."""

    def __init__(self, link: LaneLink, threads: ThreadPoolExecutor, ranks: TrainerRanks) -> None:
        super().__init__("lanes", threads, ranks)
        self._link = link
        self._exchange = Exchange(threads, link.config.advanced.timeout_s)
        self._prepared = set[Member]()
        self._has_told = False

    def leaves_receipts(self, member: Member) -> bool:
        return True

    def send(self, live: Engines, update: Update) -> Receipts:
        deadline = time.monotonic() + self._link.config.advanced.timeout_s
        version, timers = update.version, update.timers
        with timers("pause"):
            self._exchange.pause(live, deadline)
        if new := {m: r for m, r in live.items() if m not in self._prepared}:
            with timers("prepare"):
                self._order("prepare", new, version, lambda serial, give_up: None, deadline)
            self._prepared |= new.keys()

        def transfer(serial: str, give_up: Callable[[], None]) -> None:
            word = _Word([lane for member in live for lane in _lanes(member)], serial)
            self._link.tell(word)
            self._has_told = True
            self._link.give(word, update.outgoing, deadline, give_up)

        with timers("wire"):
            task: Task = "check" if update.check else "receive"
            return self._order(task, live, version, transfer, deadline)

    def settle(self, outgoing: Outgoing) -> None:
        """Tells the other ranks that no engine gets anything, if none did."""
        if not self._has_told:
            self._link.tell(_Word([]))
        self._has_told = False
        outgoing.drain()

    def _order(
        self,
        task: Task,
        receivers: Engines,
        version: int,
        transfer: Callable[[str, Callable[[], None]], None],
        deadline: float,
    ) -> Receipts:
        store, serial = self._link.store, uuid.uuid4().hex[:8]
        timeout_s = call_timeout_s(self._link.config.advanced.timeout_s)
        order = Order(serial, "", task, timeout_s, store.address)
        ranks = {member: _lanes(member) for member in receivers}
        orders = {m: [replace(order, lane=lane) for lane in ranks[m]] for m in receivers}
        return self._exchange.carry_out(
            orders, receivers, version, ranks, lambda give_up: transfer(serial, give_up), deadline,
            store,
        )  # fmt: skip


def _lanes(member: Member) -> range:
    return range(member.lane, member.lane + member.num_ranks)


class Sleep:
    """Puts engines to sleep and wakes them. Lives in rank 0 of the trainer."""

    def __init__(
        self, register: EngineRegistry, attempt: str, *, timeout_s: float, start_timeout_s: float
    ) -> None:
        """Starts from the state in the last roster.

        Args:
            start_timeout_s: of an engine's start, before which it cannot sleep, and of the end of a
                fenced engine.
        """
        self._register, self._attempt = register, attempt
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._threads = ThreadPoolExecutor(thread_name_prefix="sleep")
        register.take_over()

    def wake(self) -> None:
        """Lets missing engines start; the others wake when they get weights."""
        members.give(self._register.paths, self._attempt, "engines")

    def fall_asleep(self, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """Waits until every engine has released its memory.

        Unfinished requests go back to their clients. Those send them again, and engines keep what
        comes from now on until they have woken.

        Args:
            on_wait: polled while waiting.

        Raises:
            PeerTimeoutError: an engine neither starts nor fails, or a fenced one does not end.
        """
        register = self._register
        members.give(register.paths, self._attempt, "trainer")
        still = "still starting after {}, and no GPU to train on before"
        self._wait_while_any(lambda member: member.state == "STARTING", still, on_wait)
        awake = {
            member: register.client(member)
            for member in self._of_attempt()
            if member.state == "HEALTHY" and register.state(member) not in ("ASLEEP", "FENCED")
        }
        for member in awake:
            register.note(member, "SYNCING")
        register.write()
        slept, failed = each(
            self._threads,
            awake,
            self._release,
            2 * self._timeout_s,
            on_wait,
        )
        for member in slept:
            register.note(member, "ASLEEP")
        for member, reason in failed.items():
            register.fence(member, reason)
        register.write()
        # Nobody can make them release their memory. A task that died says so of its engine when it
        # has started again, and read its data.
        self._wait_while_any(self._is_to_end, "fenced, and not ended within {}", on_wait)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _release(self, engine: EngineClient) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._empty(engine, deadline)
        while not _has_released(engine):
            engine.resume()
            self._empty(engine, deadline)

    def _empty(self, engine: EngineClient, deadline: float) -> None:
        """Ends its requests, and has it keep further ones for later: clients that have not noticed
        ask again within a tenth of a second."""
        while left := engine.num_requests():
            engine.abort_all()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"does not release its memory: {left} requests still run after "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(_IDLE_POLL_S)
        engine.shut()
        engine.pause()

    def _wait_while_any(
        self, is_awaited: Callable[[Member], bool], said: str, on_wait: Callable[[], None]
    ) -> None:
        """Waits at most as long as an engine may take to start; the error names the late ones."""
        deadline = time.monotonic() + self._start_timeout_s
        while left := [m for m in self._of_attempt() if is_awaited(m)]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{m.id} ({m.reason})" if m.reason else m.id for m in left)
                raise PeerTimeoutError(f"{said.format(f'{self._start_timeout_s:g} s')}: {names}")
            on_wait()
            time.sleep(_STARTS_POLL_S)

    def _is_to_end(self, member: Member) -> bool:
        return member.state == "HEALTHY" and self._register.state(member) == "FENCED"

    def _of_attempt(self) -> list[Member]:
        return [
            member for member in self._register.list_announced() if member.attempt == self._attempt
        ]


def _has_released(engine: EngineClient) -> bool:
    """Has a paused engine release its memory, unless it was asked again: the embedded one counts
    and refuses what comes, SGLang keeps it outside."""
    if engine.num_requests():
        return False
    try:
        engine.release_memory(MEMORY)
    except EngineError:
        if engine.num_requests():
            return False
        raise
    return True
