"""A run as a service shows it: what the service does not have yet is sent, now or as it comes."""

import importlib
import importlib.util
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from relax_hpc import job_file
from relax_hpc.boards import description
from relax_hpc.boards.samples import Samples
from relax_hpc.boards.service import Described, Service
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import states
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.runs import status
from relax_hpc.telemetry.event_tail import EventTail
from relax_hpc.telemetry.events import Event
from relax_hpc.telemetry.points import Point, Points, Rewind

_LOOK_S = 5.0
Make = Callable[[Described], Service]
_CLASSES = {"wandb": "Wandb", "mlflow": "Mlflow"}
"""Services, each a module of that name beside this one which needs the package of that name, and
the class in it."""


class _Row(NamedTuple):
    """Points of one step that came together."""

    step: int
    values: Mapping[str, float]
    time: float


class Export:
    """Reads the events of a run and sends each point once, whoever has begun to send them.

    What was sent is noted in the run directory. A step that is trained again after a resume is not
    sent again: services only add to what they have.

    Args:
        paths: of the run.
        config: of the run.
        name: of the service.
        make: the service, if it is not the one of that name.

    Raises:
        ConfigError: the package of the service is not installed.
    """

    def __init__(
        self, paths: RunPaths, config: JobConfig, name: str, *, offline: bool,
        make: Make | None = None,
    ) -> None:  # fmt: skip
        self._note = paths.exported(name)
        self._tail = EventTail(paths.events_folder)
        self._points = Points()
        self._samples = Samples(paths, config)
        noted = read_json(self._note) or {"id": f"{config.name[:80]}-{uuid.uuid4().hex[:8]}"}
        self._id, self._sent = noted["id"], dict[str, int](noted.get("sent", {}))
        self._write()
        self._service = (make or _service(name))(
            Described(
                self._id, config.name, config.boards.project, description.settings(config),
                paths.root.absolute(), offline, config.boards.tracking_uri,
            )
        )  # fmt: skip

    @property
    def num_files(self) -> int:
        """Files that are looked at for events."""
        return self._tail.num_files

    @property
    def id(self) -> str:
        """The run's own at the service."""
        return str(self._id)

    @property
    def step(self) -> int:
        """The newest one."""
        return self._points.step

    def update(self) -> list[Event]:
        """Sends what came since the last update, and returns the events that came.

        Of very many it takes some, and is to be called again until there are none.
        """
        events = self._tail.read()
        rows = list(_rows(self._fresh(self._points.take(events))))
        texts = list(self._samples.take(events, self._points.step))
        for row in rows:
            self._service.log(row.step, row.values, row.time)
        for text in texts:
            if self._is_new(text.tag, text.step):
                self._service.say(text)
        if rows or texts:
            self._write()
        return events

    def end(self, *, failed: bool) -> None:
        """Sends the rest, and says that the run is over."""
        self.update_all()
        self._service.finish(failed=failed)

    def pause(self) -> None:
        """Ends the sending, and not the run."""
        self.update_all()
        self._service.pause()

    def update_all(self) -> None:
        """Sends all that came."""
        while self.update():
            pass

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


class Sent(NamedTuple):
    id: str
    """Id of the run at the service."""
    step: int
    """Newest step that it has."""


def send(run_dir: Path, name: str, *, offline: bool, follow: bool, uri: str | None = None) -> Sent:
    """Sends a run, from outside its job.

    Args:
        run_dir: of the run.
        name: of the service.
        offline: write it below the run directory.
        follow: go on until the run is over or somebody interrupts.
        uri: of MLflow's server, in place of the job's.

    Raises:
        ConfigError: the job itself sends it, the package of the service is not installed, or
            nobody says which server it is.
    """
    paths = RunPaths(run_dir)
    config, state = job_file.read_resolved(paths.config), status.job_state(run_dir)
    if uri is not None:
        boards = config.boards.model_copy(update={"tracking_uri": uri})
        config = config.model_copy(update={"boards": boards})
    if name == "mlflow" and not offline and config.boards.tracking_uri is None:
        raise ConfigError(
            f"{run_dir}: names no server of MLflow (boards.tracking_uri); give --tracking-uri "
            "http://HOST:PORT, or --offline"
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
    return Sent(export.id, export.step)


def _rows(points: Iterable[Point]) -> Iterator[_Row]:
    """Neighbours of one step as one."""
    row: _Row | None = None
    for point in points:
        if row is None or point.step != row.step or point.tag in row.values:
            if row is not None:
                yield row
            row = _Row(point.step, {}, point.time)
        row = row._replace(values={**row.values, point.tag: point.value})
    if row is not None:
        yield row


def _service(name: str) -> Make:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"the package {name} is not installed here; pip install 'relax-hpc[{name}]'"
        )
    module = importlib.import_module(f"relax_hpc.boards.{name}")
    return cast(Make, getattr(module, _CLASSES[name]))
