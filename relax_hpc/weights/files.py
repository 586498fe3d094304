"""Weights through the run directory: a snapshot that engines load, each by itself."""

import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Phase, Timers
from relax_hpc.weights.loading import Load, load
from relax_hpc.weights.loads import Loaded, Loads
from relax_hpc.weights.ranks import Rest, TrainerRanks
from relax_hpc.weights.snapshot import Snapshot
from relax_hpc.weights.staging import Outgoing
from relax_hpc.weights.transport import Delivery, answers
from relax_hpc.weights.verify import Sent, compare


class FileTransport:
    """See `transport.Transport`; nobody but engines and a file system take part.

    Every rank of the trainer writes its share. A version is written once, so engines that come
    later cost nobody anything but themselves.
    """

    def __init__(
        self,
        config: WeightsConfig,
        threads: ThreadPoolExecutor,
        ranks: TrainerRanks,
        loads: Loads | None = None,
    ) -> None:
        """Without `loads`, every delivery waits until engines have loaded."""
        self._loads = loads
        self._config, self._threads, self._ranks = config, threads, ranks
        self._newest: Snapshot | None = None
        self._by_name = ""
        self._in_use, self._lock = Counter[Path](), Lock()

    def leaves_receipts(self, member: Member) -> bool:
        return member.takes_orders

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Never: a snapshot is whole, for whoever comes."""
        return False

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Writes the snapshot, unless it is there.

        Only what this trainer has written counts: one that was killed may have made this version
        otherwise.

        Raises:
            SnapshotError: it cannot be written.
        """
        if self._newest and self._newest.version == version:
            self._ranks.tell(Rest())
            return
        with self._lock:
            in_use = [folder for folder, users in self._in_use.items() if users]
        with timers("write"):
            self._newest = self._ranks.write_snapshot(version, outgoing.tensors(), in_use=in_use)
        self._by_name = outgoing.by_name

    def deliver(
        self,
        live: dict[Member, EngineControl],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """Every engine pauses, loads the snapshot and goes on; nobody waits for another."""
        snapshot = self._newest
        assert snapshot
        sent = Sent(snapshot.manifest.checksums, self._by_name)
        if self._loads:
            for member, engine in live.items():
                self._begin(self._loads, member, engine, snapshot, sent if check else None)
            return Delivery({}, {}, {}, sent, resumed=True, begun=list(live))
        loads, failed = answers(
            self._threads,
            live,
            lambda member: self._load(member, live[member], snapshot, check=check),
            self._config.timeout_s,
        )
        for part in ("pause", "load", "resume"):
            spent = [getattr(load, part) for load in loads.values()]
            timers.seconds[f"time/{part}"] = max(spent, default=0.0)
        taken = {member: live[member] for member in loads}
        receipts = {member: load.receipts for member, load in loads.items() if load.receipts}
        return Delivery(taken, failed, receipts, sent, resumed=True)

    def settle(self, outgoing: Outgoing) -> None:
        """Does nothing: `stage` took the stream to the end if it began it."""

    def close(self) -> None:
        """Nothing is held."""

    def _begin(
        self,
        loads: Loads,
        member: Member,
        engine: EngineControl,
        snapshot: Snapshot,
        sent: Sent | None,
    ) -> None:
        """The snapshot stays at least until its end; `sent` is what is to be compared."""

        def load_it() -> Loaded:
            start = time.time()
            with held:
                done = self._load(member, engine, snapshot, check=sent is not None)
            phases = [Phase("load", start, time.time() - start)]
            receipts = {member: done.receipts} if done.receipts else {}
            verified = compare({member: engine}, sent, receipts) if sent else None
            seconds = {"pause": done.pause, "load": done.load, "resume": done.resume}
            return Loaded(member, snapshot.version, seconds, done.receipts, verified, phases=phases)

        held = ExitStack()
        held.enter_context(self._used(snapshot.folder))
        loads.begin(member, snapshot.version, load_it)

    def _load(
        self, member: Member, engine: EngineControl, snapshot: Snapshot, *, check: bool
    ) -> Load:
        folder, version = snapshot.folder, snapshot.version
        with self._used(folder):
            return load(member, engine, folder, version, self._config.timeout_s, check=check)

    @contextmanager
    def _used(self, folder: Path) -> Iterator[None]:
        with self._lock:
            self._in_use[folder] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[folder] -= 1
