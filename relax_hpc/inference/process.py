"""Runs an engine server as a child process: starts, watches and ends it.

The process is tied to its owner, and ended as a whole.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self

import psutil

from relax_hpc.errors import ConfigError, EngineError, ends_of
from relax_hpc.inference import leash
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.embedded import launch as embedded
from relax_hpc.inference.sglang import launch as sglang
from relax_hpc.inference.spec import ALONE, EngineSpec, NodeShare
from relax_hpc.runtime import hardware
from relax_hpc.runtime.comm.address import hold_port, with_port
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.files.storage import patiently
from relax_hpc.runtime.process import facts, place_of, python_stacks, without_mpi

_LEASH = (sys.executable, "-S", "-E", leash.__file__)
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
            said_before: bytes of earlier processes in the log.
        """
        self.token, self.log_path, self.url = token, log_path, ""
        self._process, self._reaper, self._said_before = process, reaper, said_before
        self._leader = _process_of(process.pid)
        self._started = time.monotonic()
        self._control: EngineClient | None = None
        self.remedy_for: Callable[[str], str] = lambda _: ""
        """Returns a remedy for some output; "" if none is known."""

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
        """Returns how the process ended; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code >= 0:
            return f"ended with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def output(self) -> str:
        """Returns the output so far; of a long one, the end."""

        def read() -> str:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._said_before, size - _READ_BYTES))
                return log.read().decode(errors="replace")

        return patiently(self.log_path, read)

    def cause(self) -> str:
        """Returns the last exception in its output, with a remedy if known; "" if there is none."""
        output = self.output()
        found = [ends_of(str(each), _SHOWN_CHARACTERS) for each in _EXCEPTION.findall(output)[-1:]]
        return ": ".join(filter(None, [*found, self.remedy_for(output)]))

    def last_lines(self) -> str:
        """Returns the end of its log, for an error message."""
        lines = self.output().splitlines()[-_SHOWN_LINES:]
        return "\n".join([f"the end of {self.log_path}:", *lines])

    def whereabouts(self) -> str:
        """Returns where its processes hang, before a stop.

        Processes that can dump their stacks have them in the log.
        """
        log = patiently(self.log_path, lambda: os.open(self.log_path, os.O_RDONLY))
        try:
            return "; ".join(filter(None, (_whereabouts(each.pid, log) for each in self._family())))
        finally:
            os.close(log)

    def stop(self, grace_s: float = 10) -> None:
        """Ends the engine and the processes it started: SIGTERM first, then SIGKILL.

        Its processes are those of its session, so children of a dead leader are found, and no
        others.
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


def _whereabouts(pid: int, log: int) -> str:
    known = facts(pid)
    if known is None:
        return ""
    place = place_of(python_stacks(pid, log, wake=known.is_stopped))
    python_stacks(pid, log, every=True)  # for its log
    where = f" in {known.channel}" * bool(known.channel) + f", at {place}" * bool(place)
    return f"process {pid}: state {known.state}{where}"


def spawn(argv: list[str], log_path: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts `argv` on a leash, in a session of its own, with its output appended to `log_path`.

    A reaper ends the rest of the session when this process dies.
    """
    env = without_mpi(os.environ) | dict(environment)
    log, said_before = patiently(log_path, lambda: _open_log(log_path), small=True)
    try:
        process = subprocess.Popen(
            [*_LEASH, "hold", str(os.getpid()), *argv],
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
        [*_LEASH, "reap", str(process.pid)],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    return EngineProcess(process, reaper, "", log_path, said_before=said_before)


def _open_log(log_path: Path) -> tuple[int, int]:
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


_POLL_S = 0.25
_LENT_S = 0.5
_PORT_ATTEMPTS = 5


def start_engine(
    spec: EngineSpec,
    *,
    host: str,
    token: str,
    log_path: Path,
    python: str | None = None,
    share: NodeShare = ALONE,
    least_gpus: int = 0,
    progress: Callable[[str], None] = lambda phase: None,
    may_compute: Callable[[], bool] = lambda: True,
) -> EngineProcess:
    """Starts an engine and waits until it is healthy.

    It is killed when the calling *thread* ends (that is how Linux defines the owner), so call this
    from a thread that outlives the engine.

    Args:
        host: address to bind: loopback, or the node's if the trainer runs elsewhere.
        log_path: for its output; readable by the user only.
        python: interpreter that has the engine; this one by default.
        share: this process's part of an engine that spans several nodes.
        least_gpus: number of GPUs that this node must have.
        progress: called repeatedly with the phase; if it raises, the engine is stopped and the
            exception propagates.
        may_compute: polled until it is true; the engine takes no GPU memory before. This wait does
            not count as its start. It may raise, like `progress`.

    Raises:
        ConfigError: `spec.args` are wrong, or GPUs are missing.
        EngineError: not healthy in time; has the phase, a remedy, and the end of the log.
    """
    if least_gpus:
        hardware.check_gpus(least_gpus, hardware.count_gpus(), "the driver")
    with scratch_folder("engine") as folder:  # nobody else enters it: the token goes there
        start = _Start(spec, folder, host, token, log_path, python, progress, may_compute)
        if spec.kind == "embedded":
            return start.embedded(least_gpus)
        return start.sglang(share)


class _Start(NamedTuple):
    """A start of an engine, with a private folder."""

    spec: EngineSpec
    folder: Path
    host: str
    token: str
    log_path: Path
    python: str | None
    progress: Callable[[str], None]
    may_compute: Callable[[], bool]

    def embedded(self, gpus: int) -> EngineProcess:
        spec = self.spec
        while not self.may_compute():
            time.sleep(_LENT_S)
        embedded.check(spec.args, f"engines.{spec.pool}")
        options, port_file = self.folder / "options.json", self.folder / "port"
        embedded.write_options(options, spec, token=self.token, port_file=port_file, gpus=gpus)
        argv = embedded.command(spec.model_path, self.host, options, self.python)
        engine = spawn(argv, self.log_path, {})
        engine.token = self.token

        def is_up() -> bool:
            if port_file.exists():
                port = port_file.read_text(encoding="utf-8")
                engine.url = f"http://{with_port(self.host, port)}"
            return bool(engine.url) and engine.is_healthy()

        return self._wait_until(is_up, engine, lambda _: "loading the model")

    def sglang(self, share: NodeShare) -> EngineProcess:
        spec, pool = self.spec, f"engines.{self.spec.pool}"
        options, device = self.folder / "options.yaml", _device()
        sglang.write_options(options, self.token)
        environment = sglang.environment(
            device, spec.model_path, is_quantized=spec.quantization is not None
        )
        # The parts of an engine over several nodes are started again together, by its host.
        attempts = _PORT_ATTEMPTS if share.nodes == 1 else 1
        gate = None if self.may_compute() else self.folder / "gate"
        for attempt in range(attempts):
            # SGLang cannot report the port it got; it searches for more, which nobody holds for it.
            with hold_port(self.host) as port:
                argv = sglang.arguments(spec, host=self.host, port=port, device=device, share=share)
                argv = [*sglang.command(self.python), "--config", str(options), *argv]
                if gate:
                    argv += [sglang.GATE, str(gate)]
                engine = spawn(argv, self.log_path, environment)
                engine.token, engine.url = self.token, f"http://{with_port(self.host, port)}"
                engine.remedy_for = partial(sglang.remedy, engine_args=spec.args, pool=pool)
                try:
                    # That takes as long as the engine's own imports, beside which it is done.
                    sglang.check(spec.args, pool)
                except ConfigError:
                    engine.stop()
                    raise
                try:
                    self._wait_until(engine.is_healthy, engine, sglang.phase, gate)
                    with engine.client() as client:
                        client.freeze_heap(_HEALTH_S)
                    return engine
                except EngineError:
                    last = attempt + 1 == attempts
                    if last or not sglang.port_taken(engine.output()):
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _wait_until(
        self,
        is_up: Callable[[], bool],
        engine: EngineProcess,
        phase_of: Callable[[str], str],
        gate: Path | None = None,
    ) -> EngineProcess:
        """Waits until the engine is up; after an error nothing is left behind.

        Args:
            phase_of: output -> phase.
            gate: file to create when the engine may compute.
        """
        timeout_s = self.spec.start_timeout_s
        try:
            while gate and not gate.exists() and not engine.end():
                if self.may_compute():
                    gate.touch()
                else:
                    time.sleep(_LENT_S)
            deadline = time.monotonic() + timeout_s
            while not is_up():
                end, output = engine.end(), engine.output()
                phase = phase_of(output)
                self.progress(phase)
                if not end and time.monotonic() > deadline:
                    end = f"ran out of time while {phase}, {engine.age_s:.0f} s after its start"
                    end += f" (engines.{self.spec.pool}.advanced.start_timeout_s = {timeout_s})"
                elif end:
                    end += f" while {phase}"
                if end:
                    said = ": ".join(filter(None, [end, engine.cause()]))
                    raise EngineError(f"{engine} {said}\n{engine.last_lines()}")
                time.sleep(_POLL_S)
        except BaseException:
            engine.stop()
            raise
        return engine


def _device() -> Literal["cpu", "cuda"]:
    """Asks the driver: importing torch would take seconds, for which the engine waits."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    count = ctypes.c_int(0)
    is_there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return "cuda" if is_there and count.value else "cpu"
