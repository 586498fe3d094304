"""Adds and removes engines of a running job.

It compares what was asked for with what there is, and starts or ends
steps. Everything it knows stands in control/scale/state.json, which it alone writes.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import LaunchError
from relax_hpc.fleet import members, roster
from relax_hpc.fleet.roster import Roster
from relax_hpc.fleet.scaling import Extra, Outcome, Request, ScaleState
from relax_hpc.fleet.standing import standing
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json_once
from relax_hpc.storage import exists

log = logging.getLogger(__name__)

START_MARGIN_S = 60
"""Seconds that Slurm may take to start a step, besides the engine's own time."""
END_MARGIN_S = 15
"""Seconds from the end of a drain until the step is ended from outside."""


class Steps(Protocol):
    """Starts and ends steps of one task, through Slurm or on this machine."""

    nodes: list[str]
    """Nodes that rollout holds besides those it started on."""

    def start(self, extra: Extra) -> ProcessId:
        """Raises LaunchError: it could not be started."""
        ...

    def end(self, extra: Extra) -> None:
        """Asks the step to end at once."""
        ...

    def last_words(self, extra: Extra) -> str:
        """Returns what a step that ended by itself left as an explanation."""
        ...


class Scaler:
    """Requests and extra engines; `tick` takes all of them a step further."""

    def __init__(self, config: RunConfig, paths: RunPaths, steps: Steps, attempt: str) -> None:
        self._config, self._paths, self._steps = config, paths, steps
        # It looks twice a second: at what has not changed since, it looks without opening a file.
        self._roster, self._members = roster.follow(paths), members.follow(paths)
        self._request = Request.follow(paths)
        self._initial = config.rollout_pool.count
        per_node = self._initial // config.rollout_pool.resources.nodes
        state = ScaleState.read(paths)
        self._state = state or ScaleState(attempt, self._initial, steps.nodes, per_node)
        self._state.nodes = steps.nodes
        if self._state.attempt != attempt:  # their steps ended with the job that they were part of
            self._state.attempt = attempt
            for extra in self._state.live:
                self._note(extra.now("GONE", "the job was started again"))
            self._restore()
        self._written: ScaleState | None = None
        self._publish()

    def tick(self) -> None:
        """Looks at everything once."""
        held = self._roster()
        for extra in self._state.live:
            self._observe(extra, held)
        self._take_request()
        self._judge()
        self._restore()
        for extra in self._state.live:
            if extra.state == "PENDING":
                self._start(extra)
        self._publish()

    def end(self, timeout_s: float) -> None:
        """Ends all extra engines, because the run ends."""
        for extra in self._state.staying:
            self._tell_to_end(extra, "GONE", "the run ended")
        deadline = time.monotonic() + timeout_s
        while self._state.live and time.monotonic() < deadline:
            for extra in self._state.live:
                self._observe(extra, None)
            time.sleep(0.1)
        for extra in self._state.live:
            self._steps.end(extra)
            self._note(extra.now("GONE", "the run ended"))
        self._publish()

    def _observe(self, extra: Extra, held: Roster | None) -> None:
        """Notes what has become of a step since the last look."""
        if extra.process is None:
            return
        [member] = self._members.get(extra.id)
        if extra.process.find() is None:
            self._ended(extra, member.reason if member and member.state == "FAILED" else "")
        elif extra.ending:
            self._insist(extra)
        elif member and member.state in ("FAILED", "GONE", "DRAINING"):
            reason = member.reason or "ended without being told to"
            self._tell_to_end(extra, "FAILED", reason)
        else:
            found = standing(member, held)
            if extra.state == "ACTIVE" and found in ("SYNCING", "HEALTHY"):
                return  # a moment of every step: no news
            self._note(extra.now(found))
            self._check_deadline(self._state.extras[extra.id])

    def _ended(self, extra: Extra, said: str) -> None:
        final = extra.ending or "FAILED"
        reason = extra.reason if extra.ending else said or self._steps.last_words(extra)
        self._note(extra.now(final, reason))
        if final == "FAILED" and not self._is_of_pending(extra):
            lost = [each for each in self._state.extras.values() if each.state == "FAILED"]
            if not extra.was_active or len(lost) > self._config.launch.max_restarts:
                self._state.engines -= 1  # else it is replaced

    def _insist(self, extra: Extra) -> None:
        if time.time() > extra.end_by:
            log.warning("%s does not end by itself: ending its step", extra.id)
            self._steps.end(extra)
            extra = replace(extra, end_by=time.time() + END_MARGIN_S)
        self._note(extra.now("DRAINING"))

    def _check_deadline(self, extra: Extra) -> None:
        """A newcomer comes up and gets weights in time, or not at all."""
        limit, missing = self._config.launch.peer_timeout_s, "the trainer gave it no weights"
        if extra.state == "STARTING":
            limit = self._config.rollout_pool.start_timeout_s + START_MARGIN_S
            missing = "its engine was not healthy"
        if not extra.was_active and time.time() > extra.since + limit:
            self._tell_to_end(extra, "FAILED", f"{missing} within {limit} s")

    def _take_request(self) -> None:
        """Takes the next request, once the one before is settled."""
        number = max(self._state.requests, default=0)
        if number and not self._state.requests[number].final:
            return
        request = self._request(number + 1)
        if request is None:
            return
        log.info("%s", request)
        self._state.requests[request.id] = Outcome("PENDING", before=self._state.engines)
        if exists(self._paths.scale_cancel(request.id)):
            return self._settle(request.id, "CANCELLED", "before it was begun")
        if request.kind == "in":
            return self._remove(request)
        count = request.engines - self._initial - len(self._state.staying)
        self._state.transport = request.transport
        self._state.engines = max(request.engines, self._state.engines)
        try:
            self._add(count, request.id)
        except LaunchError as error:
            self._state.engines = self._state.requests[request.id].before
            self._settle(request.id, "FAILED", str(error))

    def _add(self, count: int, request: int) -> None:
        free = self._state.free
        if count > len(free):
            raise LaunchError(f"{count} more engines asked for, there is room for {len(free)}")
        next_number = max((e.number for e in self._state.extras.values()), default=0) + 1
        for number, (node, slot) in enumerate(free[: max(count, 0)], start=next_number):
            extra = Extra(f"extra-{number}", request, node, slot, "PENDING", time.time())
            self._note(replace(extra, transport=self._state.transport))

    def _remove(self, request: Request) -> None:
        """Removes engines, those that came last first."""
        staying = self._state.staying
        keep = max(request.engines - self._initial, 0)
        chosen = (
            [e for e in staying if e.id == request.member] if request.member else staying[keep:]
        )
        for extra in chosen:
            self._tell_to_end(extra, "GONE", "removed", drain_s=request.drain_s)
        self._state.engines = self._initial + len(self._state.staying)

    def _judge(self) -> None:
        """Settles the request under way when it is done, or undoes it when it cannot be."""
        number = max(self._state.requests, default=0)
        if not number or self._state.requests[number].final:
            return
        request = self._request(number)
        if request is not None and request.kind == "in":
            if all(not extra.ending for extra in self._state.live):
                self._settle(number, "DONE")
            return
        mine = [e for e in self._state.extras.values() if e.request == number and e.state != "GONE"]
        failed = [extra for extra in mine if "FAILED" in (extra.state, extra.ending)]
        if failed:
            self._undo(number, mine, f"{failed[0].id} failed")
        elif exists(self._paths.scale_cancel(number)):
            self._undo(number, mine, "cancelled")
        elif all(extra.state == "ACTIVE" for extra in mine):
            return self._settle(number, "DONE")
        mine = [self._state.extras[extra.id] for extra in mine]
        if all(extra.ended for extra in mine):
            why = "; ".join(f"{extra.id}: {extra.reason}" for extra in failed)
            self._settle(number, "FAILED" if failed else "CANCELLED", why)

    def _undo(self, number: int, mine: Sequence[Extra], reason: str) -> None:
        """All or nothing: what came up for this request goes again."""
        self._state.engines = self._state.requests[number].before
        for extra in mine:
            if not extra.ended and not extra.ending:
                self._tell_to_end(extra, "CANCELLED", reason)

    def _restore(self) -> None:
        """Replaces what is missing: engines lost in service, or with an earlier job."""
        missing = self._state.engines - self._initial - len(self._state.staying)
        if missing <= 0:
            return
        try:
            self._add(missing, max(self._state.requests, default=0))
        except LaunchError as error:
            log.warning("engines that were lost are not replaced: %s", error)
            self._state.engines -= missing

    def _start(self, extra: Extra) -> None:
        try:
            process = self._steps.start(extra)
        except LaunchError as error:
            self._note(extra.now("FAILED", str(error)))
        else:
            self._note(replace(extra, process=process).now("STARTING"))

    def _tell_to_end(
        self,
        extra: Extra,
        ending: Literal["GONE", "FAILED", "CANCELLED"],
        reason: str,
        *,
        drain_s: float = 0,
    ) -> None:
        write_json_once(self._paths.drain(extra.id), {"drain_s": drain_s})
        end_by = time.time() + drain_s + END_MARGIN_S
        told = replace(extra, ending=ending, reason=reason, end_by=end_by)
        self._note(told.now("DRAINING") if extra.process else told.now(ending))

    def _is_of_pending(self, extra: Extra) -> bool:
        outcome = self._state.requests.get(extra.request)
        return outcome is not None and not outcome.final

    def _settle(
        self, number: int, state: Literal["DONE", "FAILED", "CANCELLED"], reason: str = ""
    ) -> None:
        log.info("request %d: %s %s", number, state, reason)
        before = self._state.requests[number].before
        self._state.requests[number] = Outcome(state, before, reason)

    def _note(self, extra: Extra) -> None:
        before = self._state.extras.get(extra.id)
        if before is None or before.state != extra.state:
            log.info("%s on %s: %s %s", extra.id, extra.node, extra.state, extra.reason)
        self._state.extras[extra.id] = extra

    def _publish(self) -> None:
        if self._state == self._written:
            return
        ids = [extra.id for extra in self._state.live]
        if self._written is None or ids != [extra.id for extra in self._written.live]:
            members.announce_extras(self._paths, ids)
        self._state.write(self._paths)
        state = self._state
        self._written = replace(state, requests=dict(state.requests), extras=dict(state.extras))
