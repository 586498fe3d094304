"""Engines that come for their weights: the owner of one has it load the newest snapshot there is.

So the trainer need not be there, nor know who is. An engine that fails a load holds undefined
weights: it stays paused, and its owner starts it again.
"""

import logging
import math
import time

from relax_hpc.comm.orders import Receipt
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.errors import EngineError
from relax_hpc.fleet import switches
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.paths import RunPaths
from relax_hpc.roles.engine.hosting import Hosting
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Phase
from relax_hpc.weights.loading import Load, load
from relax_hpc.weights.newest import Newest, follow
from relax_hpc.weights.verify import Sent, compare

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class NewestVersion:
    """The newest policy that engines can have; looks once a second at most."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        """Where the trainer brings weights to engines, it is 0 for ever."""
        self._newest, self._version = follow(paths), 0
        self._next_look = 0.0 if config.launch.layout == "separate" else math.inf

    def __call__(self) -> int:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            newest = self._newest()
            self._version = newest.version if newest else 0
        return self._version


class Puller:
    """Brings one start of an engine up to date.

    Args:
        hosting: how it is kept.
        paths: of the run.
        events: are told of every load.
    """

    def __init__(self, hosting: Hosting, paths: RunPaths, events: EventWriter) -> None:
        self._hosting, self._paths, self._events = hosting, paths, events
        self._notes = switches.Notes(paths)
        self._newest = follow(paths)
        self._loaded: Newest | None = None
        self._next_look = 0.0

    def due(self) -> Newest | None:
        """A snapshot that it does not have, if there is one; looks once a second at most."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY_S
        newest = self._newest()
        if newest and self._loaded and newest.folder == self._loaded.folder:
            return None
        return newest

    def pull(self, member: Member, url: str, token: str, newest: Newest) -> Member:
        """Has the engine load a snapshot, or one that has taken its place meanwhile.

        Returns:
            Its record, with the version that it holds.

        Raises:
            EngineError: it did not load any; its weights are undefined.
        """
        hosting = self._hosting
        with EngineClient(
            url,
            token,
            timeout_s=hosting.update_timeout_s,
            recompute=hosting.recomputes,
            has_prefix_cache=not hosting.spec.args.get("disable_radix_cache"),
        ) as engine:
            return self.pull_with(engine, member, newest)

    def pull_with(self, engine: EngineControl, member: Member, newest: Newest) -> Member:
        """Does as `pull`, with a client of the engine."""
        while True:
            begun = time.time()
            try:
                done = load(
                    member, engine, newest.folder, newest.version,
                    self._hosting.update_timeout_s, check=newest.is_checked,
                )  # fmt: skip
            except EngineError as error:
                # The trainer keeps two: a slow load may find its files gone.
                again = Newest.read(self._paths)
                if again is None or again.folder == newest.folder:
                    self._note(member, newest, {}, begun, str(error))
                    raise EngineError(f"did not load v{newest.version}: {error}") from error
                log.warning("engine %s: %s; loading v%d", member.id, error, again.version)
                newest = again
                continue
            if member.takes_orders:
                self._notes.note(member, newest.version, done.receipts)
            self._loaded = newest
            self._note(member, newest, _seconds(done), begun)
            self._verify(engine, member, newest, done.receipts)
            return member._replace(version=newest.version)

    def _verify(
        self, engine: EngineControl, member: Member, newest: Newest, receipts: list[Receipt]
    ) -> None:
        if not newest.is_checked:
            return
        sent = Sent(newest.checksums, newest.by_name)
        found = compare({member: engine}, sent, {member: receipts} if receipts else {})
        self._events.emit("verify", version=newest.version, **found._asdict())
        if not found.equal:
            log.error("the engine holds other weights than the trainer: %s", found)

    def _note(
        self, member: Member, newest: Newest, spent: dict[str, float], begun: float, error: str = ""
    ) -> None:
        members, fenced = ([], [member.id]) if error else ([member.id], list[str]())
        times = {f"sync/{name}": seconds for name, seconds in spent.items()}
        self._events.emit(
            "loaded", step=newest.version, version=newest.version, members=members, fenced=fenced,
            error=error, phases=[Phase("load", begun, time.time() - begun)], **times,
        )  # fmt: skip


def _seconds(done: Load) -> dict[str, float]:
    parts = {"pause": done.pause, "load": done.load, "resume": done.resume}
    return parts | {"paused": sum(parts.values())}
