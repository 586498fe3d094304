"""TensorBoard of a run: kept up to date while it runs, or made at once of all that is there."""

import time
from contextlib import suppress
from pathlib import Path

from relax_hpc.boards import description
from relax_hpc.boards.samples import Samples
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.telemetry import curve
from relax_hpc.telemetry.event_tail import EventTail
from relax_hpc.telemetry.events import Event
from relax_hpc.telemetry.points import Points, Rewind
from relax_hpc.telemetry.tensorboard import TensorBoard, Text

_CURVE_EVERY_S = 60.0


class RunBoard:
    """Draws the events of a run as they come: `tensorboard/`, and a picture of the curve.

    Nothing is made before there is a point.
    """

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        self._paths, self._config = paths, config
        self._tail = EventTail(paths.events_folder)
        self._points = Points()
        self._samples = Samples(paths, config)
        self._said: list[Text] = []
        self._drawn: list[Event] = []
        """Events that the picture is made of: nobody reads them again for it."""
        self._board: TensorBoard | None = None
        self._is_published = True
        self._pictured_step, self._next_picture = 0, time.monotonic() + _CURVE_EVERY_S

    @property
    def step(self) -> int:
        """The newest one."""
        return self._points.step

    @property
    def num_files(self) -> int:
        """Files that are looked at for events."""
        return self._tail.num_files

    def update(self) -> list[Event]:
        """Draws the events that came since the last update, and returns them.

        Of very many it takes some, and is to be called again until there are none.
        """
        events = self._tail.read()
        self._drawn += curve.drawn_of(events)
        points = list(self._points.take(events))
        texts = list(self._samples.take(events, self.step))
        if points or texts:
            board = self._opened()
            board.take(points)
            back = [point.step for point in points if isinstance(point, Rewind)]
            void = [text for text in self._said if back and text.step > min(back)]
            for text in [*void, *texts]:
                board.say(text)
            self._said += texts
            self._is_published = False
        if not self._is_published and not self._tail.is_behind:  # readers forget the file before
            self._opened().publish()
            self._is_published = True
        if time.monotonic() >= self._next_picture and not self._tail.is_behind:
            self.picture()
        return events

    def end(self, *, failed: bool) -> None:
        """Draws the last events, and notes that nothing is missing."""
        while self.update():
            pass
        if self._board is not None:
            self._board.end(failed=failed)
            self._board.publish()
            self._board.close()
            made = {"file": self._board.path.name, "sizes": self._tail.sizes, "failed": failed}
            write_json(self._paths.tensorboard_made, made)
        self.picture()

    def picture(self) -> None:
        """Draws the curve, if there are steps that it does not show."""
        self._next_picture = time.monotonic() + _CURVE_EVERY_S
        if self.step != self._pictured_step:
            self._pictured_step = self.step
            draw = curve.plot if isinstance(self._config, RunConfig) else curve.plot_loss
            draw(self._paths.root, self._drawn)

    def _opened(self) -> TensorBoard:
        if self._board is None:
            self._board = TensorBoard(self._paths.tensorboard)
            self._board.describe(
                self._config.name, description.settings(self._config),
                description.metrics(self._config), description.CHARTS,
            )  # fmt: skip
        return self._board


def is_complete(paths: RunPaths, *, failed: bool) -> bool:
    """Whether `RunBoard.end` has drawn all that is there."""
    made = read_json(paths.tensorboard_made)
    if made is None or made["failed"] != failed:
        return False
    sizes = {path.name: _size(path) for path in paths.events_folder.glob("*.jsonl")}
    there = {name: size for name, size in sizes.items() if size}
    return (paths.tensorboard / made["file"]).exists() and bool(there == made["sizes"])


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
