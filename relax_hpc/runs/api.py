"""Controls runs from a script or a notebook, without output.

Remarks of a command go to this module's logger, at level INFO.
"""

import importlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from relax_hpc.config import job_file
from relax_hpc.errors import ConfigError, PeerTimeoutError, show
from relax_hpc.launch import known_runs, record
from relax_hpc.launch import submit as launching
from relax_hpc.launch.slurm import ComponentJob, RunJob
from relax_hpc.runs import cancel as cancelling
from relax_hpc.runs import resume as resuming
from relax_hpc.runs import status as run_status
from relax_hpc.runs.status import RunStatus, Watch
from relax_hpc.runs.viewer import GroupQuery
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events
from relax_hpc.runtime.telemetry.history import Points, Rewind

log = logging.getLogger(__name__)

_POLL_S = 1.0
_ALL_TOKENS = 1 << 30
_TOKENS = ("head", "left_out", "tail")
_OURS = permissions.UMASKS["none"]


class Run:
    """A run: its state, curves, samples, and control.

    Args:
        run: its directory, or its name, looked up as the commands do.

    Raises:
        ConfigError: there is no such run, or several.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.run_dir = known_runs.run_dir_of(os.fspath(run)).absolute()

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r})"

    def status(self) -> RunStatus:
        """Returns what `relax-hpc status` shows."""
        return run_status.collect(self.run_dir)

    def history(self) -> list[dict[str, float]]:
        """Returns the curves of the boards: a dict by tag for each step, in order.

        Each has `step` and `time`, seconds since 1970. Step 0 is the policy before training. A step
        that was trained again after a resume counts once.
        """
        rows = dict[int, dict[str, float]]()
        for point in Points().take(read_events(RunPaths(self.run_dir).events_folder)):
            if isinstance(point, Rewind):
                rows = {step: row for step, row in rows.items() if step <= point.step}
                continue
            row = rows.setdefault(point.step, {"step": point.step, "time": point.time})
            row[point.tag] = point.value
        return [rows[step] for step in sorted(rows)]

    def dataframe(self) -> Any:  # noqa: ANN401
        """Returns `history()` as a `pandas.DataFrame`, indexed by step; needs pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("pandas is not installed here; use Run.history()") from None
        return pandas.DataFrame.from_records(self.history(), index="step")

    def samples(self, step: int | None = None, *, n: int = 16) -> list[dict[str, Any]]:
        """Returns responses with prompts, answers and rewards, siblings one after the other.

        Empty if none are on disk: shards are deleted, see `bus.keep_steps`.

        Args:
            step: only this step's batch; default is the newest responses.
            n: at most.

        Raises:
            ConfigError: the run trains on documents, or its model's tokenizer cannot be read.
            BusError: damage, or a step that is not planned.
        """
        return list(islice(self._samples(step, n), n)) if n > 0 else []

    def _samples(self, step: int | None, n: int) -> Iterator[dict[str, Any]]:
        from relax_hpc.runs.viewer.run import RunViewer  # with h5py

        view = RunViewer(self.run_dir).view(GroupQuery(groups=n, step=step), _ALL_TOKENS)
        for group in view.groups:
            prompt, data = "", group.data_row
            names = ("answer", "source", "metadata") if data else ()
            told = {name: getattr(data, name) for name in names}
            for row in group.rows:
                prompt = row.prompt or prompt
                known = row._asdict() | {"prompt": prompt, "response": row.response}
                facts = {name: said for name, said in known.items() if name not in _TOKENS}
                yield {"guid": group.guid, "step": group.step, **told, **facts}

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Waits until the run is over, in whichever way, and returns its status.

        Args:
            timeout: seconds; default is no limit.

        Raises:
            PeerTimeoutError: also a `TimeoutError`; the run goes on.
        """
        watch, begun = Watch(self.run_dir), time.monotonic()
        while not watch.is_over():
            if timeout is not None and time.monotonic() - begun >= timeout:
                said = f"is {watch.look().state} after {timeout:g} s, and goes on"
                raise PeerTimeoutError(f"{self.run_dir}: {said}")
            time.sleep(_POLL_S)
        return self.status()

    def jobs(self) -> dict[str, ComponentJob]:
        """Returns each component of the newest launch as a job of submitit.

        Raises:
            ConfigError: it was not started by Slurm.
        """
        launched = record.read(self.run_dir)
        if launched.mode != "slurm":
            raise ConfigError(f"{self.run_dir}: runs without Slurm, so it has no jobs of submitit")
        return {
            each.name: ComponentJob(each.folder, each.job_id, range(each.tasks))
            for each in launched.components
        }

    def job(self) -> RunJob:
        """Returns the newest launch as one job of submitit, whose tasks are the components."""
        return RunJob(list(self.jobs().values()))

    def cancel(self) -> None:
        """Ends every job that the run started, and nothing else.

        Raises:
            LaunchError: some may still run, or it is another user's.
        """
        from relax_hpc.runs.boards import finish  # with h5py, too

        run_dir = known_runs.own_run_dir_of(str(self.run_dir))
        with permissions.set_umask(_OURS):
            cancelling.cancel(run_dir, log.info)
            finish.complete_if_over(run_dir)

    def resume(self, *, local: bool = False, ended: bool = False, **changes: object) -> "Run":
        """Restarts a run that was cancelled or gave up, or adds steps.

        Args:
            local: as in `submit`, and so are `changes`.
            ended: the caller knows that its job has ended, though Slurm cannot say so.

        Raises:
            ConfigError: it cannot go on, or a change would alter what is trained.
            LaunchError: Slurm refused it.
        """
        said = _overrides(changes)
        with permissions.set_umask(_OURS):
            resuming.resume(self.run_dir, overrides=said, local=local, ended=ended, say=log.info)
        return self


def submit(job: str | os.PathLike[str], *, local: bool = False, **changes: object) -> Run:
    """Submits a job, or starts it on this machine.

    Args:
        job: a file, or the name of an included job (`relax-hpc init --list`).
        local: run on this machine even if Slurm is here.
        changes: keys of the job and their values. `__` stands for a dot, as in
            `schedule__num_steps=20`; `**{"schedule.num_steps": 20}` is the same.

    Raises:
        ConfigError: the run cannot work; nothing was created.
        LaunchError: Slurm refused it.
    """
    config = known_runs.below_default_root(job_file.load(_file_of(job), _overrides(changes)))
    with permissions.set_umask(_OURS):
        return Run(launching.submit(config, local=local, say=log.info).run_dir)


submit.starts_run = True  # type: ignore[attr-defined]  # for submitit's AutoExecutor


def _file_of(job: str | os.PathLike[str]) -> Path:
    path = Path(job)
    return path if path.is_file() else job_file.list_jobs().get(os.fspath(job), path)


def _overrides(changes: Mapping[str, object]) -> list[str]:
    """Formats changes for `--set`."""
    return [f"{key.replace('__', '.')}={_toml(key, value)}" for key, value in changes.items()]


def _toml(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(k)} = {_toml(key, value[k])}' for k in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(key, each) for each in value)}]"
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(plain, str | int) or (isinstance(plain, float) and math.isfinite(plain)):
        return json.dumps(plain, ensure_ascii=False)
    raise ConfigError(f"{key} = {show(value)}: is no text, number, list or table")
