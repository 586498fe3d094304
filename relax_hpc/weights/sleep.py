"""Engines that share the trainer's GPUs give their memory back while it trains.

They take it again in the next publication: first that of the weights, which are then updated, then
that of the cache, which is empty.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from relax_hpc.errors import EngineError, PeerTimeoutError
from relax_hpc.fleet import lease, members
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import MEMORY, Register
from relax_hpc.weights.transport import each

_POLL_S = 0.1
NOTICE_S = 3.0
"""Time until every client knows that an engine is not to be asked: they look once a second."""


class Sleep:
    """Lives in rank 0 of the trainer."""

    def __init__(
        self, register: Register, attempt: str, *, timeout_s: float, start_timeout_s: float
    ) -> None:
        """Takes over what the last roster says.

        Args:
            register: the publisher's.
            attempt: of the job.
            timeout_s: of falling asleep.
            start_timeout_s: of an engine's start, which cannot be put to sleep before, and of the
                end of one that is fenced.
        """
        self._register, self._attempt = register, attempt
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._threads = ThreadPoolExecutor(thread_name_prefix="sleep")
        register.take_over()

    def wake(self) -> None:
        """Lets engines that are not there yet start; the others wake when they get weights."""
        lease.give(self._register.paths, self._attempt, "engines")

    def fall_asleep(
        self, *, notice_s: float = 0.0, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Returns when no engine has more memory than it cannot do without.

        What they still have to do is handed back to those who asked, and goes on afterwards.

        Args:
            notice_s: how long an engine has to be idle before that is believed.
            on_wait: called again and again meanwhile.

        Raises:
            PeerTimeoutError: an engine neither starts nor fails, or is fenced and does not end.
        """
        register = self._register
        lease.give(register.paths, self._attempt, "trainer")
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
            lambda engine: self._release(engine, notice_s),
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

    def _release(self, engine: EngineControl, notice_s: float) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._wait_until_idle(engine, notice_s, deadline)
        engine.pause()
        while engine.num_requests():  # of who had not noticed yet
            engine.resume()
            self._wait_until_idle(engine, NOTICE_S, deadline)
            engine.pause()
        engine.release_memory(MEMORY)

    def _wait_until_idle(self, engine: EngineControl, notice_s: float, deadline: float) -> None:
        idle_since = None
        while idle_since is None or time.monotonic() < idle_since + notice_s:
            left = engine.num_requests()
            if left:
                engine.abort_all()
                idle_since, notice_s = None, NOTICE_S
            elif idle_since is None:
                idle_since = time.monotonic()
                continue
            if time.monotonic() > deadline:
                raise EngineError(
                    f"does not release its memory: {left} requests still run after "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _wait_while_any(
        self, is_awaited: Callable[[Member], bool], said: str, on_wait: Callable[[], None]
    ) -> None:
        """Waits as long as an engine may take to start; names those that take longer."""
        deadline = time.monotonic() + self._start_timeout_s
        while left := [m for m in self._of_attempt() if is_awaited(m)]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{m.id} ({m.reason})" if m.reason else m.id for m in left)
                raise PeerTimeoutError(f"{said.format(f'{self._start_timeout_s:g} s')}: {names}")
            on_wait()
            time.sleep(_POLL_S)

    def _is_to_end(self, member: Member) -> bool:
        return member.state == "HEALTHY" and self._register.state(member) == "FENCED"

    def _of_attempt(self) -> list[Member]:
        return [
            member
            for member in self._register.announced()
            if members.attempt_of(member) == self._attempt
        ]
