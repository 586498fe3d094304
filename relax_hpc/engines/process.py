"""An engine server as a child process: started, watched, and ended with its owner."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

import psutil

from relax_hpc.config import RolloutConfig
from relax_hpc.engines import leash
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.embedded import launch as embedded
from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.errors import EngineError

Device = Literal["cpu", "cuda"]

_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_MPI", "SLURM_PMI")
"""Variables of the owner's MPI rank; an engine that found them would try to join its world."""
_POLL_S = 0.1
_SHOWN_LINES = 20
_PORT_ATTEMPTS = 5
_PORT_TAKEN = ("address already in use", "is not available", "already in use")


def start_engine(
    kind: Literal["embedded", "sglang"],
    model_path: Path,
    *,
    host: str,
    token: str,
    rollout_config: RolloutConfig,
    dtype: str,
    log_path: Path,
    seed: int,
    python: str | None = None,
) -> "EngineProcess":
    """Starts an engine and waits until it is healthy.

    It is killed when the calling *thread* ends (that is how Linux defines the owner), so call from
    one that lives as long as the engine shall.

    Args:
        kind: which engine.
        model_path: Hugging Face folder.
        host: address to bind: loopback, or the node's if the trainer runs elsewhere.
        token: bearer token that its callers need.
        rollout_config: limits, timeout and pass-through arguments.
        dtype: "float32", "bfloat16" or "float16".
        log_path: where its output goes; readable by the user only.
        seed: of its own random numbers, where requests bring none.
        python: interpreter that has the engine; unset is this one.

    Raises:
        ConfigError: `rollout.engine_args` is wrong.
        EngineError: not healthy in time; says why, with the end of the log.
    """
    start = {"embedded": _start_embedded, "sglang": _start_sglang}[kind]
    folder = Path(tempfile.mkdtemp(prefix="relax-engine-"))  # mode 0700: the token goes there
    try:
        return start(folder, model_path, host, token, rollout_config, dtype, log_path, seed, python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class EngineProcess:
    """A running engine. As a context manager it stops the engine at the end."""

    def __init__(self, process: "subprocess.Popen[bytes]", token: str, log_path: Path) -> None:
        self.token, self.log_path, self.url = token, log_path, ""
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def client(self) -> EngineClient:
        return EngineClient(self.url, self.token)

    def generation_client(self) -> GenerationClient:
        return GenerationClient(self.url, self.token)

    def require_alive(self, doing: str) -> None:
        """Raises EngineError, with the end of the log, if the engine has ended."""
        if (code := self._process.poll()) is not None:
            raise EngineError(
                f"engine {self.url} (pid {self.pid}) ended with code {code} while {doing}; "
                f"{self._last_lines()}"
            )

    def wait_for(self, done: Callable[[], bool], doing: str, deadline: float) -> None:
        """Polls `done` until it holds.

        Raises:
            EngineError: the engine ended, or `deadline` (time.monotonic) passed.
        """
        while not done():
            self.require_alive(doing)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.url} (pid {self.pid}) ran out of time while {doing}; "
                    f"{self._last_lines()}"
                )
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = 10) -> None:
        """Ends the engine and the processes it started: first politely, then by SIGKILL."""
        try:
            leader = psutil.Process(self.pid)
            tree = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        if self.alive:
            self._process.terminate()
        # psutil compares start times, so a recycled pid is never taken for one of ours.
        _, left = psutil.wait_procs(tree, timeout=grace_s)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=grace_s)
        self._process.wait(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _last_lines(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return "\n".join([f"the end of {self.log_path}:", *lines])


def spawn(argv: list[str], log_path: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts `argv` on a leash, in a session of its own, with its output in `log_path`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | dict(environment)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # SGLang logs its arguments, the token among them.
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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
        os.close(log)
    return EngineProcess(process, "", log_path)


def _start_embedded(
    folder: Path,
    model_path: Path,
    host: str,
    token: str,
    rollout: RolloutConfig,
    dtype: str,
    log_path: Path,
    seed: int,
    python: str | None,
) -> EngineProcess:
    embedded.check(rollout.engine_args)
    options, port_file = folder / "options.json", folder / "port"
    embedded.write_options(
        options,
        token=token,
        port_file=port_file,
        device=_device(),
        dtype=dtype,
        max_running_requests=rollout.max_running_requests,
        engine_args=rollout.engine_args,
    )
    engine = spawn(embedded.command(model_path, host, options, python), log_path, {})
    engine.token = token
    return _until_healthy(engine, rollout.start_timeout_s, host, port_file=port_file)


def _start_sglang(
    folder: Path,
    model_path: Path,
    host: str,
    token: str,
    rollout: RolloutConfig,
    dtype: str,
    log_path: Path,
    seed: int,
    python: str | None,
) -> EngineProcess:
    sglang.check(rollout.engine_args)
    options, device = folder / "options.yaml", _device()
    sglang.write_options(options, token)
    for attempt in range(_PORT_ATTEMPTS):
        # SGLang cannot report the port it got, so somebody may take ours before it binds.
        port, log_size = _free_port(host), log_path.stat().st_size if log_path.exists() else 0
        argv = sglang.arguments(
            model_path,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            seed=seed,
            max_running_requests=rollout.max_running_requests,
            engine_args=rollout.engine_args,
        )
        argv = [*sglang.command(python), "--config", str(options), *argv]
        engine = spawn(argv, log_path, sglang.ENVIRONMENT[device])
        engine.token = token
        try:
            return _until_healthy(engine, rollout.start_timeout_s, host, port=port)
        except EngineError:
            said = log_path.read_text(errors="replace")[log_size:].lower()
            if attempt + 1 == _PORT_ATTEMPTS or not any(text in said for text in _PORT_TAKEN):
                raise
    raise AssertionError("the last attempt returns or raises")


def _until_healthy(
    engine: EngineProcess,
    timeout_s: float,
    host: str,
    *,
    port: int | None = None,
    port_file: Path | None = None,
) -> EngineProcess:
    deadline = time.monotonic() + timeout_s
    try:
        if port_file is not None:
            engine.wait_for(port_file.exists, "loading the model", deadline)
            port = int(port_file.read_text())
        engine.url = f"http://{host}:{port}"
        client = engine.client()
        engine.wait_for(lambda: client.health(5.0), "starting (no answer at /health)", deadline)
        client.close()
    except BaseException:
        engine.stop()
        raise
    return engine


def _device() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
