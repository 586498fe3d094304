"""Policy v becomes v + 1 in every engine: pause in place, broadcast, resume.

Rank 0 of the trainer sends. The communicator outlives an update; it is made anew only when the set
of members, or one member's epoch, changes. An engine that fails an update holds undefined weights:
it is fenced (left out, and never resumed) until it comes back with another epoch.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from relax_hpc.comm.bucket import NamedTensors, buckets, digest
from relax_hpc.config import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.weights import members, snapshot
from relax_hpc.weights.group import MemberGroup, Receiver
from relax_hpc.weights.members import Member

log = logging.getLogger(__name__)

_THREADS = 1024
"""At most; one waits in every engine during an update. They are started when needed."""


class Published(NamedTuple):
    """What one publication did."""

    version: int
    members: list[str]
    fenced: list[str]
    seconds: float
    """From the first gathered tensor to the last engine that resumed."""
    pause_seconds: float
    """How long engines stood still."""


class Verified(NamedTuple):
    """Digests of one version, as trainer and engines hold it."""

    trainer: str
    members: dict[str, str]
    equal: bool
    """Engines that digest by Hugging Face names equal the trainer; the others each other."""


class Publisher:
    """Lives in rank 0 of the trainer; the other ranks only feed the gather."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        ids: Callable[[], Sequence[str]],
        connect: Callable[[Member], Receiver],
        *,
        model_folder: Path,
    ) -> None:
        """Serves the members that `ids` names, whether or not they are there yet.

        Args:
            config: transport, bucket size, deadlines.
            paths: where members announce themselves.
            ids: members of this run; asked before every update, since engines come and go.
            connect: makes the client of a member.
            model_folder: what the `files` transport takes config and tokenizer from.
        """
        self._config, self._paths, self._ids = config, paths, ids
        self._connect, self._model_folder = connect, model_folder
        self._group: MemberGroup | None = None
        self._fenced: set[tuple[str, str]] = set()
        self._holding: dict[tuple[str, str], int] = {}
        self._clients: dict[tuple[str, str], Receiver] = {}
        self._version, self._staged = -1, list[NamedTensors]()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS)
        self._next_refresh = 0.0
        self._journal = paths.control / "update.json"
        last = read_json(self._journal)
        self._interrupted = last is not None and not last["done"]

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> Published:
        """Brings every healthy member to `version`. Gathers first, so engines pause briefly."""
        start = time.perf_counter()
        self._version = version
        self._staged = [list(bucket) for bucket in buckets(tensors, self._config.bucket_bytes)]
        live = self._due(self._live())
        pause_start = time.perf_counter()
        done = self._sync(live)
        end = time.perf_counter()
        fenced = sorted(member.id for member in live if member.id not in done)
        return Published(version, done, fenced, end - start, end - pause_start)

    def refresh(self, *, every_s: float = 1.0) -> list[str]:
        """Gives the current version to engines that started since; cheap enough to call often.

        Without it a restarted engine would wait for the next version, and the trainer for the
        batch that only this engine can sample.

        Returns:
            Members that were brought up to date; usually none.
        """
        if self._version < 0 or time.monotonic() < self._next_refresh:
            return []
        self._next_refresh = time.monotonic() + every_s
        known = members.read(self._paths, self._ids())
        if all(self._is_current(member) for member in known):
            return []
        live = self._due(self._live())
        return [] if all(self._is_current(member) for member in live) else self._sync(live)

    def verify(self) -> Verified:
        """Compares the digest of every engine's weights with the trainer's."""
        trainer = digest(itertools.chain(*self._staged))
        live = {m: r for m, r in self._live().items() if self._is_current(m)}
        found: dict[str, str] = {}
        self._each(live, lambda member, r: found.__setitem__(member.id, r.checksum()))
        by_name = {found[m.id] for m in live if m.engine == "embedded" and m.id in found}
        own = {found[m.id] for m in live if m.engine != "embedded" and m.id in found}
        equal = bool(found) and len(found) == len(live) and by_name <= {trainer} and len(own) <= 1
        return Verified(trainer, dict(sorted(found.items())), equal)

    def close(self) -> None:
        self._drop_group()
        self._threads.shutdown(wait=True)

    def _is_current(self, member: Member) -> bool:
        key = (member.id, member.epoch)
        return key in self._fenced or self._holding.get(key) == self._version

    def _live(self) -> dict[Member, Receiver]:
        candidates = {
            member: self._client(member)
            for member in members.read(self._paths, self._ids())
            if (member.id, member.epoch) not in self._fenced
        }
        answers = list(self._threads.map(lambda r: r.health(5.0), candidates.values()))
        return {m: r for (m, r), ok in zip(candidates.items(), answers, strict=True) if ok}

    def _due(self, live: dict[Member, Receiver]) -> dict[Member, Receiver]:
        """Those that are not ahead of this trainer.

        After a restart from a checkpoint engines hold a policy that this trainer has yet to make
        again. Going back would give their running requests older tokens than `max_staleness`
        allows, so they stay where they are until the trainer has caught up. Not so if the trainer
        before died during an update: what the engines hold then is undefined.
        """
        return {m: r for m, r in live.items() if self._interrupted or self._is_due(m, r)}

    def _is_due(self, member: Member, receiver: Receiver) -> bool:
        if (member.id, member.epoch) in self._holding:
            return True
        try:
            return receiver.version() <= self._version
        except EngineError:
            return False  # it died a moment ago

    def _client(self, member: Member) -> Receiver:
        key = (member.id, member.epoch)
        if key not in self._clients:
            self._clients[key] = self._connect(member)
        return self._clients[key]

    def _sync(self, live: dict[Member, Receiver]) -> list[str]:
        if not live:
            return []
        write_json(self._journal, {"version": self._version, "done": False})
        through = self._through_files if self._config.transport == "files" else self._through_group
        done = through(live)
        write_json(self._journal, {"version": self._version, "done": True})
        self._interrupted = False
        self._holding |= {(m.id, m.epoch): self._version for m in live if m.id in done}
        return done

    def _through_files(self, live: dict[Member, Receiver]) -> list[str]:
        folder, version = self._paths.weights(self._version), self._version
        snapshot.write(folder, itertools.chain(*self._staged), self._model_folder)

        def load(_: Member, receiver: Receiver) -> None:
            receiver.pause()
            receiver.update_weights_from_disk(str(folder), version)
            receiver.resume()

        done = self._each(live, load)
        snapshot.prune(folder)
        return done

    def _through_group(self, live: dict[Member, Receiver]) -> list[str]:
        if self._group and list(self._group.receivers) != list(live):
            self._drop_group()
        try:
            if self._group is None:
                device = self._staged[0][0][1].device.type
                self._group = MemberGroup.form(live, self._config, device, self._threads)
                write_json(self._paths.rendezvous("weights"), self._group.record())
            self._group.send(self._version, self._staged, self._threads)
        except (EngineError, RuntimeError, TimeoutError) as error:
            # Who received what is unknown, so none of them may sample on; see `_live`.
            log.error("weights v%d failed, fencing %s: %s", self._version, list(live), error)
            self._fenced |= {(m.id, m.epoch) for m in live if not live[m].health(5.0)}
            self._drop_group()
            return []
        return self._each(live, lambda _, receiver: receiver.resume())

    def _drop_group(self) -> None:
        if self._group:
            self._group.close(self._threads)
            self._group = None

    def _each(
        self, receivers: dict[Member, Receiver], call: Callable[[Member, Receiver], None]
    ) -> list[str]:
        """Calls every receiver at once; returns the ids that succeeded and fences the others."""
        futures = {m: self._threads.submit(call, m, r) for m, r in receivers.items()}
        done = []
        for member, future in futures.items():
            try:
                future.result(timeout=self._config.timeout_s)
                done.append(member.id)
            except (EngineError, TimeoutError) as error:
                log.error("engine %s is fenced: %s", member.id, error)
                self._fenced.add((member.id, member.epoch))
        return done
