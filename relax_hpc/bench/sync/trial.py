"""Updates of weights under load: trainer and engines on this machine's GPUs, real on both sides.

A trainer without optimizer (its memory would be of no use here) publishes version after version to
engines that sample all the time. Of a shape nothing but a config.json is written: both sides draw
weights, and the engines' are replaced by version 0.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.bench import shapes, train
from relax_hpc.bench.sync import wire
from relax_hpc.bench.sync.figures import Figures, Gap, Update
from relax_hpc.bench.sync.steady_load import SteadyLoad
from relax_hpc.bench.sync.task import ATTEMPT, Task
from relax_hpc.bench.train_task import grid_name
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.child import EngineProcess
from relax_hpc.engines.process import start_engine
from relax_hpc.errors import ConfigError
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.job_file import with_overrides
from relax_hpc.roles.engine.hosting import Slot, spec_of
from relax_hpc.roles.rollout.check import check_lease
from relax_hpc.run_secret import RunSecret
from relax_hpc.scratch import scratch_folder

_FEWEST = 3
"""Updates between which engines are looked at."""
_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"


def measure(
    shape: str,
    grid: Mapping[str, int],
    *,
    kind: str = "sglang",
    engines: int = 1,
    engine_tp: int = 1,
    updates: int = 10,
    in_flight: int = 64,
    compare_logprobs: bool = False,
    every_s: float = 1.0,
    compare_load: bool = False,
    colocated: bool = False,
    overrides: Sequence[str] = (),
    python: str | None = None,
) -> Figures:
    """Publishes `updates` versions after version 0.

    Args:
        shape: a name of `shapes.SHAPES`, or a folder with a config.json.
        grid: of the trainer, as `train.measure` takes it.
        kind: of the engines, sglang or embedded.
        engines: each on `engine_tp` GPUs after the trainer's.
        in_flight: requests that each engine has all the time.
        compare_logprobs: of engine and trainer, after some versions.
        every_s: from the end of an update to the next.
        compare_load: lets the engines sample for as long again without updates.
        colocated: engines are on the trainer's GPUs, sleep before every version, and have no
            requests.
        overrides: `section.key=value` of the job.
        python: interpreter that has the engine; unset is this one.

    Raises:
        ConfigError: no such shape; not enough GPUs; a rank failed.
    """
    import torch

    gpus = torch.cuda.device_count()
    task = _task(
        shape, grid, kind, engines, engine_tp, updates, compare_logprobs, every_s, colocated,
        overrides,
    )  # fmt: skip
    if colocated:
        check_lease(task.config)
        in_flight = 0
    needed = task.first_gpu_of_engines + engines * engine_tp
    if gpus and needed > gpus:
        raise ConfigError(f"trainer and engines take {needed} GPUs, but {gpus} are here; use fewer")
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("bench"))
        config = task.config.model_copy(update={"run_root": folder})
        task = task._replace(config=_with_model(config, shape, folder))
        task.config.run_dir.mkdir()
        RunSecret.create(task.paths.secret)
        has_wire = gpus and not colocated
        speed = wire.measure([0, *range(task.first_gpu_of_engines, needed)]) if has_wire else 0.0
        with (
            _engines(task, python) as running,
            _load_of(task, running, in_flight) as load,
        ):
            _run_ranks(task)
            found = json.loads(task.results.read_text())
            done = [Update(**update) for update in found["updates"]]
            speeds = _speeds(load, done, every_s) if compare_load and in_flight else _NO_SPEEDS
    return Figures(
        shape,
        grid_name(task.config.actor.layout),
        f"{engines} {kind}, tp{engine_tp}",
        in_flight,
        done,
        [Gap(**gap) for gap in found["gaps"]],
        found["equal"],
        speed,
        load.failed,
        *speeds,
    )


def _task(
    shape: str,
    grid: Mapping[str, int],
    kind: str,
    engines: int,
    engine_tp: int,
    updates: int,
    compare_logprobs: bool,
    every_s: float,
    colocated: bool,
    overrides: Sequence[str],
) -> Task:
    import torch

    args: dict[str, Any] = {}
    if kind == "sglang":
        args = {"tp_size": engine_tp, "load_format": "dummy"}
        if colocated:
            args["mem_fraction_static"] = 0.5
    tree: dict[str, Any] = {
        "name": "bench",
        "model": {
            "path": "unused",
            "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        },
        "prompts": {"train": "unused"},
        "actor": {"layout": dict(grid)},
        "engines": {"rollout": {"kind": kind, "count": engines, "args": args}},
        "schedule": {"num_steps": updates},
    }
    if colocated:
        tree["engines"]["rollout"] |= {"placement": "actor"}
        tree["schedule"] |= {"max_staleness": 0}
    config = with_overrides(tree, overrides, source="bench sync")
    assert isinstance(config, RunConfig)
    first = 0 if colocated else config.actor.layout.world_size
    return Task(config, shape, updates, first, compare_logprobs, every_s)


def _with_model(config: RunConfig, shape: str, folder: Path) -> RunConfig:
    model = shapes.model_folder(shape, folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


@contextmanager
def _engines(task: Task, python: str | None) -> Iterator[list[EngineProcess]]:
    """Starts them side by side and announces them."""
    import torch

    pool, secret = task.config.rollout_pool, RunSecret.read(task.paths.secret)
    tp = int(str(pool.args.get("tp_size", 1)))

    def start(number: int) -> EngineProcess:
        args = dict(pool.args)
        if pool.kind == "sglang" and torch.cuda.is_available():
            args["base_gpu_id"] = task.first_gpu_of_engines + number * tp
            args["enable_memory_saver"] = task.is_colocated
        return start_engine(
            replace(spec_of(task.config, Slot("", number, 0)), args=args, seed=number),
            host="127.0.0.1",
            token=secret.engine_token(f"rollout-{number}", ATTEMPT),
            log_path=task.paths.log("engine", str(number)),
            python=python,
        )

    # An engine dies with the thread that started it, so these live until all is done.
    with ThreadPoolExecutor(pool.count) as threads, ExitStack() as stack:
        running = []
        for number, engine in enumerate(threads.map(start, range(pool.count))):
            stack.callback(engine.stop)
            running.append(engine)
            name = f"rollout-{number}"
            member = Member(name, ATTEMPT, engine.url, tp, pool.kind, "HEALTHY")
            lane = number * tp if task.is_colocated else -1
            transport = task.config.weights.transport
            members.announce(task.paths, member._replace(lane=lane, transport=transport))
        yield running


def _load_of(task: Task, engines: Sequence[EngineProcess], in_flight: int) -> SteadyLoad:
    config = json.loads((task.config.model.path / "config.json").read_text())
    return SteadyLoad(
        [(engine.url, engine.token) for engine in engines],
        in_flight,
        vocabulary=config["vocab_size"],
        length=task.config.rollout.max_new_tokens,
    )


class _Speeds(NamedTuple):
    """Tokens per second of the engines; 0 where there was too little time to tell."""

    updated: float
    undisturbed: float


_NO_SPEEDS = _Speeds(0.0, 0.0)


def _speeds(load: SteadyLoad, updates: Sequence[Update], every_s: float) -> _Speeds:
    """While versions came, and for as long after them.

    From the second version on, since the first forms the communicator, to where the last one
    begins, whose contents are compared.
    """
    if len(updates) < _FEWEST:
        return _NO_SPEEDS
    begin, end = updates[1].began, updates[-1].began
    calm = time.time() + every_s
    time.sleep(every_s + end - begin + 1)
    return _Speeds(load.tokens_per_s(begin, end), load.tokens_per_s(calm, calm + end - begin))


def _run_ranks(task: Task) -> None:
    from relax_hpc.bench.sync import rank as sync_rank

    # As in a job: engines, which run already, could not release memory with it.
    os.environ.setdefault(_SEGMENTS, "expandable_segments:True")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=sync_rank.run, args=(rank, task), daemon=False)
        for rank in range(task.num_ranks)
    ]
    train.run_to_end(ranks)
    if not task.results.exists():
        raise ConfigError("a rank failed; its error is above")
