"""Has engines load snapshots, through the run directory, each at its own time.

An engine loads one in place: pause, load, resume. Loads may run in the background, so an engine on
a slow network holds up no other.
"""

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, Self

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import EngineRegistry, Engines, Key, Member
from relax_hpc.inference.switches import Notes
from relax_hpc.runtime.comm.orders import Order, Receipt, Task, receipt_file
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.files.storage import delete
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Phase
from relax_hpc.weights.snapshot import Snapshot
from relax_hpc.weights.transport import (
    Delivery,
    DigestComparison,
    Rest,
    SentDigests,
    TrainerRanks,
    Transport,
    Update,
    answers,
    compare,
)

_POLL_S = 0.05


class Loaded(NamedTuple):
    """Load of a snapshot by one member."""

    member: Member
    version: int
    """The loaded version, which may not be the newest any more."""
    seconds: Mapping[str, float] = {}
    """Times until the member was paused (`pause`), of its `load`, and until it had resumed
    (`resume`)."""
    receipts: Sequence[Receipt] = ()
    """Receipts of the member's ranks, if requested and supported."""
    verified: DigestComparison | None = None
    reason: str = ""
    """Reason why its weights are undefined; empty if it holds the version."""
    phases: Sequence[Phase] = ()

    def verify(self, engine: EngineClient, sent: SentDigests) -> Self:
        """Compares what it holds with what was written."""
        receipts = {self.member: self.receipts} if self.receipts else {}
        return self._replace(verified=compare({self.member: engine}, sent, receipts))

    def emit(self, events: EventWriter, num_bytes: int | None = None) -> None:
        """Writes the `loaded` event, with the rate if the size of the weights is known."""
        times = {f"sync/{name}": spent for name, spent in self.seconds.items()}
        if times:
            times["sync/paused"] = sum(self.seconds.values())
        if times and num_bytes is not None:
            times["sync/gb_per_s"] = num_bytes / 1e9 / times["sync/load"]
        members, fenced = [self.member.id], list[str]()
        if self.reason:
            members, fenced = fenced, members
        size = {} if num_bytes is None else {"num_bytes": num_bytes}
        events.emit(
            "loaded", step=self.version, version=self.version, members=members, fenced=fenced,
            error=self.reason, phases=self.phases, **size, **times,
        )  # fmt: skip


def load_snapshot(
    member: Member,
    engine: EngineClient,
    folder: Path,
    version: int,
    timeout_s: float,
    notes: Notes,
    *,
    check: bool,
) -> Loaded:
    """Has an engine load a snapshot. If that fails, it stays paused with undefined weights.

    Args:
        notes: get how far its requests were.
        check: whether ranks compare what they hold with the folder, where they can.

    Raises:
        EngineError: it did not load it.
    """
    begun, times, receipts = time.time(), [time.perf_counter()], list[Receipt]()
    engine.pause()
    times.append(time.perf_counter())
    engine.update_weights_from_disk(str(folder), version)
    times.append(time.perf_counter())
    if member.takes_orders:
        task: Task = "compare" if check else "count"
        receipts = _receipts(task, member, engine, folder, version, timeout_s)
    times.append(time.perf_counter())
    engine.resume()
    times.append(time.perf_counter())
    pause, loaded, _, resume = (end - start for start, end in itertools.pairwise(times))
    if member.takes_orders:
        notes.note(member, version, receipts)
    phases = [Phase("load", begun, time.time() - begun)]
    seconds = {"pause": pause, "load": loaded, "resume": resume}
    return Loaded(member, version, seconds, receipts, phases=phases)


def _receipts(
    task: Task,
    member: Member,
    engine: EngineClient,
    folder: Path,
    version: int,
    timeout_s: float,
) -> list[Receipt]:
    """Requests receipts from the ranks of a paused member. They answer in files, since no other
    connection to them is certain."""
    order = Order(uuid.uuid4().hex[:8], "", task, timeout_s, folder=str(folder))
    engine.receive_weights([order] * member.num_ranks, version=version)
    receipts = []
    for rank in range(member.num_ranks):
        path = receipt_file(order.folder, order.serial, rank)
        record = read_json(path)
        if record is None:
            raise EngineError(f"its rank {rank} left no {path}")
        receipts.append(Receipt(**record))
        delete(path)
    return receipts


class _LoadUnderWay(NamedTuple):
    member: Member
    version: int
    deadline: float


class Loads:
    """Runs loads, each in a thread that writes the outcome to the roster at once: engines that have
    loaded can sample while the trainer trains. Lives in rank 0 of the trainer."""

    def __init__(self, register: EngineRegistry, timeout_s: float) -> None:
        """Changes the roster for members that load, and for no other."""
        self._register, self._timeout_s = register, timeout_s
        self._under_way = dict[Key, _LoadUnderWay]()
        self._lock = Lock()
        self._ended: SimpleQueue[Loaded] = SimpleQueue()
        self._failure: Exception | None = None
        """Error of a thread that could not record how its load ended."""

    def begin(self, member: Member, version: int, load: Callable[[], Loaded]) -> None:
        """Has a SYNCING member load `version`; an error in `load` fences it."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._under_way[member.key] = _LoadUnderWay(member, version, deadline)
        # A trainer that fails does not stay for the sake of a load.
        Thread(target=self._run, args=(member, version, load), daemon=True).start()

    def has(self, member: Member) -> bool:
        with self._lock:  # not between the end of a load and what the register says of it
            return member.key in self._under_way

    def expire(self) -> None:
        """Fences members that have loaded for too long.

        Raises:
            Exception: a thread could not record how its load ended; `take_ended` raises it, too.
        """
        self._check()
        with self._lock:
            now = time.monotonic()
            for late in [each for each in self._under_way.values() if now > each.deadline]:
                reason = f"has not loaded v{late.version} within {self._timeout_s:.0f} s"
                self._end(Loaded(late.member, late.version, reason=reason))

    def wait(self) -> bool:
        """Waits until nobody loads, at most `timeout_s`. Returns whether anybody was loading."""
        waited = False
        while self._under_way:
            waited = True
            self.expire()
            time.sleep(_POLL_S)
        return waited

    def take_ended(self) -> list[Loaded]:
        self._check()
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, member: Member, version: int, load: Callable[[], Loaded]) -> None:
        try:
            try:
                loaded = load()
            except (EngineError, OSError) as error:
                loaded = Loaded(member, version, reason=str(error))
            with self._lock:
                if member.key in self._under_way:  # else it came too late
                    self._end(loaded)
        except Exception as error:  # noqa: BLE001 -- the trainer would hear nothing of it
            self._failure = error

    def _end(self, loaded: Loaded) -> None:
        register, member = self._register, loaded.member
        if loaded.reason:
            register.fence(member, loaded.reason)
        else:
            register.note(member, "ACTIVE", version=loaded.version)
        register.write()
        self._ended.put(loaded)
        del self._under_way[member.key]


class FileTransport(Transport):
    """Brings weights by files; needs no network between trainer and engines.

    Every rank of the trainer writes its share. A version is written once, however many engines load
    it later.
    """

    def __init__(
        self,
        config: WeightsConfig,
        threads: ThreadPoolExecutor,
        ranks: TrainerRanks,
        notes: Notes,
        loads: Loads | None = None,
    ) -> None:
        """`loads` runs the loads in the background; without it every delivery waits for them."""
        self._loads, self._notes = loads, notes
        self._config, self._threads, self._ranks = config, threads, ranks
        self._newest: Snapshot | None = None
        self._by_name = ""
        self._in_use, self._lock = Counter[Path](), Lock()

    def stage(self, update: Update) -> None:
        """Writes the snapshot, unless this trainer already has.

        A snapshot of a trainer that was killed does not count: its policy of this version may
        differ.

        Raises:
            SnapshotError: it cannot be written.
        """
        version, outgoing = update.version, update.outgoing
        if self._newest and self._newest.version == version:
            self._ranks.tell(Rest())
            return
        with self._lock:
            in_use = [folder for folder, users in self._in_use.items() if users]
        with update.timers("write"):
            self._newest = self._ranks.write_snapshot(version, outgoing.tensors(), in_use=in_use)
        self._by_name = outgoing.by_name

    def deliver(self, live: Engines, update: Update) -> Delivery:
        """Has every engine pause, load the snapshot and resume, independently of the others."""
        snapshot = self._newest
        assert snapshot
        sent = SentDigests(snapshot.manifest.checksums, self._by_name)
        if self._loads:
            for member, engine in live.items():
                self._begin(self._loads, member, engine, snapshot, sent if update.check else None)
            return Delivery(sent=sent, resumed=True, begun=list(live))
        loads, failed = answers(
            self._threads,
            live,
            lambda member: self._load(member, live[member], snapshot, check=update.check),
            self._config.advanced.timeout_s,
        )
        for part in ("pause", "load", "resume"):
            spent = [load.seconds[part] for load in loads.values()]
            update.timers.seconds[f"time/{part}"] = max(spent, default=0.0)
        taken = {member: live[member] for member in loads}
        receipts = {member: load.receipts for member, load in loads.items() if load.receipts}
        return Delivery(taken, failed, receipts, sent, resumed=True)

    def _begin(
        self,
        loads: Loads,
        member: Member,
        engine: EngineClient,
        snapshot: Snapshot,
        sent: SentDigests | None,
    ) -> None:
        """Begins a load; the snapshot stays at least until its end. `sent` is compared if given."""

        def load() -> Loaded:
            with held:
                loaded = self._load(member, engine, snapshot, check=sent is not None)
            return loaded.verify(engine, sent) if sent else loaded

        held = ExitStack()
        held.enter_context(self._use(snapshot.folder))
        loads.begin(member, snapshot.version, load)

    def _load(
        self, member: Member, engine: EngineClient, snapshot: Snapshot, *, check: bool
    ) -> Loaded:
        folder, version, timeout_s = (
            snapshot.folder,
            snapshot.version,
            self._config.advanced.timeout_s,
        )
        with self._use(folder):
            return load_snapshot(
                member, engine, folder, version, timeout_s, self._notes, check=check
            )

    @contextmanager
    def _use(self, folder: Path) -> Iterator[None]:
        with self._lock:
            self._in_use[folder] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[folder] -= 1
