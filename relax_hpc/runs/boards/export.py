"""Sends a run's new curves to a service, Weights & Biases or MLflow, at once or continuously."""

import html
import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from relax_hpc.config import job_file
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import states
from relax_hpc.runs import status
from relax_hpc.runs.boards.run_board import Board, Setting, settings
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import Event
from relax_hpc.runtime.telemetry.history import Point, Rewind
from relax_hpc.runtime.telemetry.tensorboard import Text

_LOOK_S = 5.0


class Described(NamedTuple):
    """A run as described to a service."""

    id: str
    """The run's id there; the same after a restart."""
    name: str
    project: str
    settings: Mapping[str, Setting]
    folder: Path
    """Run directory, for the service's files."""
    offline: bool
    """Send nothing."""
    address: str | None = None
    """URL, for services with several servers."""


class Service(Protocol):
    """Takes points: each once, and in order per tag."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Takes values by tag; the time is in seconds since the epoch."""

    def say(self, text: Text) -> None:
        """Takes a text."""

    def finish(self, *, failed: bool) -> None:
        """Ends the run there, once all is sent."""

    def pause(self) -> None:
        """Leaves it unfinished, since the run goes on."""


_STEP = "step"
"""Horizontal axis of all curves in W&B, whose own step does not allow late evaluations."""


class Wandb:
    """A run of W&B; without an account or network in `wandb/` of the run directory."""

    def __init__(self, run: Described) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume=None if run.offline else "allow",
            config=dict(run.settings),
            dir=str(run.folder),
            mode="offline" if run.offline else None,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({_STEP: step, **values, "_timestamp": time})

    def say(self, text: Text) -> None:
        shown = self._wandb.Html(f"<pre>{html.escape(text.text)}</pre>", inject=False)
        self._run.log({_STEP: text.step, text.tag: shown})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()  # its process has written all by then

    def pause(self) -> None:
        self.finish(failed=False)


_TAG = "relax_hpc.id"
"""MLflow assigns its own ids; this tag finds a run again."""
_MOST_PARAMS, _LONGEST = 100, 6000
"""Most params per request, and characters of one."""


class Mlflow:
    """A run of MLflow; offline in the database `mlflow.db` of the run directory."""

    def __init__(self, run: Described) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it has no other switch
        from mlflow import MlflowClient

        address = f"sqlite:///{run.folder}/mlflow.db" if run.offline else run.address
        self._client = MlflowClient(tracking_uri=address)
        known = self._client.get_experiment_by_name(run.project)
        kept = str(run.folder / "mlflow") if run.offline else None
        experiment = (
            known.experiment_id if known else self._client.create_experiment(run.project, kept)
        )
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(experiment, run)

    def _create(self, experiment: str, run: Described) -> str:
        from mlflow.entities import Param

        made = self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id})
        settings = [Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items()]
        for first in range(0, len(settings), _MOST_PARAMS):
            some = settings[first : first + _MOST_PARAMS]
            self._client.log_batch(made.info.run_id, params=some)
        return str(made.info.run_id)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        points = [Metric(tag, value, int(1e3 * time), step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def say(self, text: Text) -> None:
        self._client.log_text(self._id, text.text, f"{text.tag}/{text.step:06}.txt")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def pause(self) -> None:
        """Nothing to do: it stays RUNNING."""


Make = Callable[[Described], Service]
_SERVICES: dict[str, Make] = {"wandb": Wandb, "mlflow": Mlflow}
"""Services by the name of the package that they need."""


class _StepPoints(NamedTuple):
    """Points of one step that came together."""

    step: int
    values: Mapping[str, float]
    time: float


class Export(Board):
    """Reads the events of a run and sends each point once, even after a restart.

    A record in the run directory notes what was sent. A step trained again after a resume is not
    sent again: services are append-only.

    Args:
        name: of the service.
        make: replaces the service.

    Raises:
        ConfigError: the package of the service is not installed.
    """

    def __init__(
        self, paths: RunPaths, config: JobConfig, name: str, *, offline: bool,
        make: Make | None = None,
    ) -> None:  # fmt: skip
        super().__init__(paths, config)
        self._note = paths.export(name)
        noted = read_json(self._note) or {"id": f"{config.name[:80]}-{uuid.uuid4().hex[:8]}"}
        self._id, self._sent = noted["id"], dict[str, int](noted.get("sent", {}))
        self._write()
        self._service = (make or _service(name))(
            Described(
                self._id, config.name, config.boards.project, settings(config),
                paths.root.absolute(), offline, config.boards.advanced.tracking_uri,
            )
        )  # fmt: skip

    @property
    def id(self) -> str:
        """The run's id at the service."""
        return str(self._id)

    def _take(
        self, events: Sequence[Event], points: Sequence[Point | Rewind], texts: Sequence[Text]
    ) -> None:
        rows = list(_rows(self._fresh(points)))
        for row in rows:
            self._service.log(row.step, row.values, row.time)
        for text in texts:
            if self._is_new(text.tag, text.step):
                self._service.say(text)
        if rows or texts:
            self._write()

    def end(self, *, failed: bool) -> None:
        """Sends the rest, and ends the run at the service."""
        self.update_all()
        self._service.finish(failed=failed)

    def pause(self) -> None:
        """Stops sending, without ending the run."""
        self.update_all()
        self._service.pause()

    def _fresh(self, points: Iterable[Point | Rewind]) -> Iterator[Point]:
        for point in points:
            if isinstance(point, Point) and self._is_new(point.tag, point.step):
                yield point

    def _is_new(self, tag: str, step: int) -> bool:
        if step <= self._sent.get(tag, -1):
            return False
        self._sent[tag] = step
        return True

    def _write(self) -> None:
        write_json(self._note, {"id": self._id, "sent": self._sent, "time": time.time()})


class SentStep(NamedTuple):
    id: str
    step: int
    """Newest step at the service."""


def send(
    run_dir: Path, name: str, *, offline: bool, follow: bool, uri: str | None = None
) -> SentStep:
    """Sends a run, from outside its job.

    Args:
        name: of the service.
        offline: write it below the run directory.
        follow: continue until the run is over or interrupted.
        uri: of MLflow's server, overrides the job's.

    Raises:
        ConfigError: the job itself sends it, the package of the service is not installed, or
            no server is named.
    """
    paths = RunPaths(run_dir)
    config, state = job_file.read_resolved(paths.config), status.job_state(run_dir)
    if uri is not None:
        advanced = config.boards.advanced.model_copy(update={"tracking_uri": uri})
        boards = config.boards.model_copy(update={"advanced": advanced})
        config = config.model_copy(update={"boards": boards})
    if name == "mlflow" and not offline and config.boards.advanced.tracking_uri is None:
        raise ConfigError(
            f"{run_dir}: names no server of MLflow (boards.advanced.tracking_uri); give "
            "--tracking-uri http://HOST:PORT, or --offline"
        )
    if name in config.boards.export and not states.is_over(state):
        raise ConfigError(
            f"{run_dir}: is {state.lower()}, and its job sends it to {name} (boards.export); what "
            "is missing can be sent once it is over"
        )
    export = Export(paths, config, name, offline=offline)
    try:
        while follow and not states.is_over(state):
            export.update_all()
            time.sleep(_LOOK_S)
            state = status.job_state(run_dir)
    except KeyboardInterrupt:
        pass  # the run goes on
    if states.is_over(state):
        export.end(failed=state != "COMPLETED")
    else:
        export.pause()
    return SentStep(export.id, export.step)


def _rows(points: Iterable[Point]) -> Iterator[_StepPoints]:
    row: _StepPoints | None = None
    for point in points:
        if row is None or point.step != row.step or point.tag in row.values:
            if row is not None:
                yield row
            row = _StepPoints(point.step, {}, point.time)
        row = row._replace(values={**row.values, point.tag: point.value})
    if row is not None:
        yield row


def _service(name: str) -> Make:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"the package {name} is not installed here; pip install 'relax-hpc[{name}]'"
        )
    return _SERVICES[name]
