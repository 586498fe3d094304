"""Starts an engine and waits until it can be used, naming what it is doing meanwhile."""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from relax_hpc.comm import gpus
from relax_hpc.engines.child import EngineProcess, spawn
from relax_hpc.engines.embedded import launch as embedded
from relax_hpc.engines.ports import held_port
from relax_hpc.engines.sglang import diagnosis
from relax_hpc.engines.sglang import launch as sglang
from relax_hpc.engines.sglang.launch import ALONE, Share
from relax_hpc.engines.spec import EngineSpec
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.scratch import scratch_folder

Device = Literal["cpu", "cuda"]
Progress = Callable[[str], None]

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
    share: Share = ALONE,
    least_gpus: int = 0,
    progress: Progress = lambda phase: None,
    may_compute: Callable[[], bool] = lambda: True,
) -> EngineProcess:
    """Starts an engine and waits until it is healthy.

    It is killed when the calling *thread* ends (that is how Linux defines the owner), so call from
    one that lives as long as the engine shall.

    Args:
        spec: what it computes.
        host: address to bind: loopback, or the node's if the trainer runs elsewhere.
        token: bearer token that its callers need.
        log_path: where its output goes; readable by the user only.
        python: interpreter that has the engine; unset is this one.
        share: which part of an engine that spans several nodes this is.
        least_gpus: this node has to have so many.
        progress: told what the engine is doing, again and again; if it raises, the engine is
            stopped and the exception goes on to the caller.
        may_compute: asked again and again until it is true; the engine takes no memory of a GPU
            before. What that takes does not count as its start. If it raises, it is as above.

    Raises:
        ConfigError: `spec.args` are wrong, or GPUs are missing.
        EngineError: not healthy in time; says what it was doing, what may help, and the end of the
            log.
    """
    if least_gpus:
        gpus.check(least_gpus, gpus.count(), "the driver")
    start = {"embedded": _start_embedded, "sglang": _start_sglang}[spec.kind]
    with scratch_folder("engine") as folder:  # nobody else enters it: the token goes there
        return start(
            _Wanted(
                spec,
                folder,
                host,
                token,
                log_path,
                python,
                share,
                least_gpus,
                progress,
                may_compute,
            )
        )


class _Wanted(NamedTuple):
    """The arguments of `start_engine`, and a private folder."""

    spec: EngineSpec
    folder: Path
    host: str
    token: str
    log_path: Path
    python: str | None
    share: Share
    least_gpus: int
    progress: Progress
    may_compute: Callable[[], bool]


def _start_embedded(wanted: _Wanted) -> EngineProcess:
    spec = wanted.spec
    while not wanted.may_compute():
        time.sleep(_LENT_S)
    embedded.check(spec.args, f"engines.{spec.pool}")
    options, port_file = wanted.folder / "options.json", wanted.folder / "port"
    embedded.write_options(
        options,
        token=wanted.token,
        port_file=port_file,
        dtype=spec.dtype,
        max_running_requests=spec.max_running_requests,
        gpus=wanted.least_gpus,
        engine_args=spec.args,
    )
    argv = embedded.command(spec.model_path, wanted.host, options, wanted.python)
    engine = spawn(argv, wanted.log_path, {})
    engine.token = wanted.token

    def is_up() -> bool:
        if port_file.exists():
            engine.url = f"http://{wanted.host}:{port_file.read_text()}"
        return bool(engine.url) and engine.is_healthy()

    return _until(is_up, engine, wanted, lambda _: "loading the model")


def _start_sglang(wanted: _Wanted) -> EngineProcess:
    spec, args = wanted.spec, wanted.spec.args
    options, device = wanted.folder / "options.yaml", _device()
    sglang.write_options(options, wanted.token)
    # The parts of an engine over several nodes are started again together, by its host.
    attempts = _PORT_ATTEMPTS if wanted.share.nodes == 1 else 1
    gate = None if wanted.may_compute() else wanted.folder / "gate"
    for attempt in range(attempts):
        # SGLang cannot report the port it got; and it searches for more, which nobody holds for it.
        with held_port(wanted.host) as port:
            argv = sglang.arguments(
                spec.model_path,
                host=wanted.host,
                port=port,
                device=device,
                dtype=spec.dtype,
                seed=spec.seed,
                max_running_requests=spec.max_running_requests,
                engine_args=args,
                routed_experts=spec.routed_experts,
                share=wanted.share,
                quantization=spec.quantization,
            )
            argv = [*sglang.command(wanted.python), "--config", str(options), *argv]
            if gate:
                argv += [sglang.GATE, str(gate)]
            environment = sglang.environment(
                device, spec.model_path, is_quantized=spec.quantization is not None
            )
            engine = spawn(argv, wanted.log_path, environment)
            engine.token, engine.url = wanted.token, f"http://{wanted.host}:{port}"
            engine.remedy_for = partial(
                diagnosis.remedy, engine_args=args, pool=f"engines.{spec.pool}"
            )
            try:
                # That takes as long as the engine's own imports, beside which it is done.
                sglang.check(args, f"engines.{spec.pool}")
            except ConfigError:
                engine.stop()
                raise
            try:
                return _until(engine.is_healthy, engine, wanted, diagnosis.phase, gate)
            except EngineError:
                last = attempt + 1 == attempts
                if last or not diagnosis.port_taken(engine.output()):
                    raise
    raise AssertionError("the last attempt returns or raises")


def _until(
    is_up: Callable[[], bool],
    engine: EngineProcess,
    wanted: _Wanted,
    phase_of: Callable[[str], str],
    gate: Path | None = None,
) -> EngineProcess:
    """Waits; whatever goes wrong, nothing is left behind.

    Args:
        is_up: whether it can be used.
        engine: just spawned.
        wanted: how long to wait, and who is told of progress.
        phase_of: its output -> what it is doing.
        gate: made when the engine may compute.
    """
    timeout_s = wanted.spec.start_timeout_s
    try:
        while gate and not gate.exists() and not engine.end():
            if wanted.may_compute():
                gate.touch()
            else:
                time.sleep(_LENT_S)
        deadline = time.monotonic() + timeout_s
        while not is_up():
            end, output = engine.end(), engine.output()
            phase = phase_of(output)
            wanted.progress(phase)
            if not end and time.monotonic() > deadline:
                end = f"ran out of time while {phase}, {engine.age_s:.0f} s after its start"
                key = f"engines.{wanted.spec.pool}.start_timeout_s"
                end += f" ({key} = {timeout_s})"
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


def _device() -> Device:
    """Asks the driver: torch would take seconds to be imported, and the engine waits for this."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    count = ctypes.c_int(0)
    is_there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return "cuda" if is_there and count.value else "cpu"
