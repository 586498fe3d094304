"""An engine server as a child process: tied to its owner, watched, and ended as a whole."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from relax_hpc.engines import leash
from relax_hpc.engines import reaper as reaping
from relax_hpc.engines.client import EngineClient
from relax_hpc.hangs.process import facts, place_of, python_stacks
from relax_hpc.storage import patiently

_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_MPI", "SLURM_PMI")
"""Variables of the owner's MPI rank; an engine that found them would try to join its world."""
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 300
_READ_BYTES = 1 << 20
_EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception)(?:: .+)?$", re.MULTILINE)
"""The line that ends a traceback."""
_HEALTH_S = 5.0


class EngineProcess:
    """A running engine. As a context manager it stops the engine at the end."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reaper: "subprocess.Popen[bytes]",
        token: str,
        log_path: Path,
        *,
        said_before: int,
    ) -> None:
        """Takes over a process that leads a session of its own.

        Args:
            process: the leader.
            reaper: ends the session when this process dies.
            token: bearer token that its callers need.
            log_path: where its output goes.
            said_before: bytes of the log that are not this process's.
        """
        self.token, self.log_path, self.url = token, log_path, ""
        self._process, self._reaper, self._said_before = process, reaper, said_before
        self._leader = _process_of(process.pid)
        self._started = time.monotonic()
        self._control: EngineClient | None = None
        self.remedy_for: Callable[[str], str] = lambda _: ""
        """Says what may help, by the output; "" if nothing is known."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def client(self) -> EngineClient:
        return EngineClient(self.url, self.token)

    def is_healthy(self) -> bool:
        """Whether it answers at /health; `url` must be known."""
        if self._control is None:
            self._control = self.client()
        return self._control.health(_HEALTH_S)

    def end(self) -> str:
        """Says how the process ended; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code >= 0:
            return f"ended with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def output(self) -> str:
        """Returns what the process has said so far; of much, the newest."""

        def read() -> str:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._said_before, size - _READ_BYTES))
                return log.read().decode(errors="replace")

        return patiently(self.log_path, read)

    def cause(self) -> str:
        """The exception that stands last in its output, and what may help; "" if there is none."""
        output = self.output()
        found = [str(each)[:_SHOWN_CHARACTERS] for each in _EXCEPTION.findall(output)[-1:]]
        return ": ".join(filter(None, [*found, self.remedy_for(output)]))

    def last_lines(self) -> str:
        """The end of its log, for an error message."""
        lines = self.output().splitlines()[-_SHOWN_LINES:]
        return "\n".join([f"the end of {self.log_path}:", *lines])

    def whereabouts(self) -> str:
        """Tells where its processes stand, for one that does not answer and is to be stopped.

        The stacks of those that can be asked are in its log.
        """
        log = patiently(self.log_path, lambda: os.open(self.log_path, os.O_RDONLY))
        try:
            return "; ".join(filter(None, (_whereabouts(each.pid, log) for each in self._family())))
        finally:
            os.close(log)

    def stop(self, grace_s: float = 10) -> None:
        """Ends the engine and the processes it started: first politely, then by SIGKILL.

        What it started is told by the session that it leads, so that children of a leader that is
        dead already are found, and nobody else's are.
        """
        if self._control is not None:
            self._control.close()
        if self.alive:
            self._process.terminate()
        # psutil compares start times, so a recycled pid is never taken for one of ours.
        _, left = psutil.wait_procs(self._family(), timeout=grace_s)
        # The leader may have started more while it ended.
        left = [*left, *(process for process in self._family() if process not in left)]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=grace_s)
        self._process.wait(grace_s)
        self._dismiss_reaper(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __str__(self) -> str:
        return f"engine {self.url} (pid {self.pid})" if self.url else f"engine (pid {self.pid})"

    def _dismiss_reaper(self, grace_s: float) -> None:
        pipe = self._reaper.stdin
        if pipe is None or pipe.closed:
            return
        with suppress(BrokenPipeError):  # it was killed
            pipe.write(b".")
            pipe.close()
        self._reaper.wait(grace_s)

    def _family(self) -> list[psutil.Process]:
        try:
            found = {self._leader, *self._leader.children(recursive=True)} if self._leader else {}
        except psutil.NoSuchProcess:
            found = {}
        return [*{*found, *filter(self._is_of_session, psutil.process_iter())}]

    def _is_of_session(self, process: psutil.Process) -> bool:
        # The kernel gives the number of a session to nobody while one of its members lives.
        try:
            return os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what a program is given that is no MPI rank, though its owner is one."""
    return {k: v for k, v in environment.items() if not k.startswith(_FOREIGN)}


def _whereabouts(pid: int, log: int) -> str:
    known = facts(pid)
    if known is None:
        return ""
    place = place_of(python_stacks(pid, log, wake=known.is_stopped))
    python_stacks(pid, log, every=True)  # for its log
    where = f" in {known.channel}" * bool(known.channel) + f", at {place}" * bool(place)
    return f"process {pid}: state {known.state}{where}"


def spawn(argv: list[str], log_path: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts `argv` on a leash, in a session of its own, with its output added to `log_path`.

    Whatever is left of the session when this process has died, a reaper ends.
    """
    env = without_mpi(os.environ) | dict(environment)
    log, said_before = patiently(log_path, lambda: _opened(log_path), small=True)
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", leash.__file__, str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    finally:
        with suppress(OSError):  # the engine has it
            os.close(log)
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-E", reaping.__file__, str(process.pid)],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    return EngineProcess(process, reaper, "", log_path, said_before=said_before)


def _opened(log_path: Path) -> tuple[int, int]:
    """Returns the log, to be added to, and its size."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # Ours, whatever an engine may say: it knows a token.
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return log, os.fstat(log).st_size
    except OSError:
        os.close(log)
        raise


def _process_of(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
