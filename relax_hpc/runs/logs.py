"""The lines a run's tasks wrote, in order of time, each with the task that wrote it."""

import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.launch import record
from relax_hpc.launch.record import LaunchedComponent
from relax_hpc.launch.script import batch_log
from relax_hpc.paths import ComponentPaths
from relax_hpc.roles.table import joining

_POLL_S = 0.5
_BLOCK = 1 << 16
_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")


class LogLine(NamedTuple):
    source: str
    """"<component>-<rank>", "<component> on <node>" before its tasks have logs of their own, or
    "job" for the script that starts and restarts the steps."""
    text: str
    time: str
    """Time at which it was written, "YYYY-MM-DD HH:MM:SS"; that of the line before if it says
    none."""


class Logs:
    """The logs of a run, read as far as they are there."""

    def __init__(
        self, run_dir: Path, component: str | None = None, *, last: int | None = None
    ) -> None:
        """Finds them.

        Args:
            run_dir: of the run.
            component: only of its tasks; of the script with "job".
            last: so many lines of what is there already, the newest.

        Raises:
            ConfigError: not a run directory, nothing was started in it, or it has no such
                component.
        """
        self._run_dir, self._component, self._last = run_dir, component, last
        self._tails: dict[Path, _Tail] = {}
        self._find()

    @property
    def sources(self) -> set[str]:
        """Who writes them."""
        return {tail.source for tail in self._tails.values()}

    def read(self, *, to_the_end: bool) -> Iterator[LogLine]:
        """Yields the lines that have come; half a line is left for later unless `to_the_end`."""
        self._find()  # engines that are added have logs, too
        last, self._last = self._last, None
        tails = list(self._tails.values())
        if last is not None:
            for tail in tails:
                tail.skip_but(last)
        merged = heapq.merge(
            *(tail.read(to_the_end=to_the_end) for tail in tails), key=lambda line: line.time
        )
        return merged if last is None else iter(deque(merged, maxlen=last))

    def _find(self) -> None:
        for source, path in sources(self._run_dir, self._component):
            self._tails.setdefault(path, _Tail(source, path))


def lines(
    run_dir: Path, component: str | None = None, *, last: int | None = None
) -> Iterator[LogLine]:
    """Yields the lines so far, see `Logs`.

    Raises:
        ConfigError: not a run directory, nothing was started in it, or it has no such component.
    """
    return Logs(run_dir, component, last=last).read(to_the_end=True)


def follow(
    run_dir: Path,
    component: str | None = None,
    *,
    until: Callable[[], bool],
    last: int | None = None,
) -> Iterator[LogLine]:
    """Yields the lines so far, then others as they come; ends after the round in which `until`
    holds.

    Raises:
        ConfigError: not a run directory, nothing was started in it, or it has no such component.
    """
    found = Logs(run_dir, component, last=last)
    while True:
        over = until()  # asked first, so that lines written before it became true are read
        yield from found.read(to_the_end=over)
        if over:
            return
        time.sleep(_POLL_S)


def sources(run_dir: Path, component: str | None = None) -> list[tuple[str, Path]]:
    """The log files of a run and who writes them; some may not exist yet.

    Raises:
        ConfigError: the run has no such component, or is none.
    """
    launched = record.read(run_dir)
    known = [*(each.name for each in launched.components), *joining(), "job"]
    if component not in (None, *known):
        raise ConfigError(
            f"--component {component}: this run has no such component; use {', '.join(known)}"
        )
    scripts = [("job", batch_log(launched.folder, leader)) for leader in launched.leaders]
    found = scripts if component in (None, "job") else []
    for each in launched.components:
        if component not in (None, each.name):
            continue
        found += printed(each, ("out", "err"))
    for name in joining() if component is None else {component} & set(joining()):
        for folder in sorted((launched.folder / name).glob(f"{name}-*")):
            found += [(folder.name, folder / "log.out"), (folder.name, folder / "log.err")]
    return found


def printed(
    component: LaunchedComponent,
    streams: Sequence[Literal["out", "err"]],
    ranks: Sequence[int] = (),
) -> list[tuple[str, Path]]:
    """Lists who printed, and the files: tasks, all or these `ranks`, and for a node those that did
    not get as far as to have a log."""
    left, name = ComponentPaths(component.folder, component.leader), component.name
    places = [(f"{name}-{rank}", str(rank)) for rank in ranks or range(component.tasks)]
    places += [(f"{name} on {node}", node) for node in left.nodes()]
    return [(who, left.log(place, stream)) for who, place in places for stream in streams]


class _Tail:
    """One file, read from where it was read to."""

    def __init__(self, source: str, path: Path) -> None:
        self.source = source
        self._path, self._position, self._time = path, 0, ""

    def skip_but(self, count: int) -> None:
        """Begins `count` lines before the end, at the time that the skipped ones said last."""
        try:
            with self._path.open("rb") as file:
                data, place = b"", file.seek(0, 2)
                while place > 0 and data.count(b"\n") <= count:
                    size = min(_BLOCK, place)
                    place = file.seek(place - size)
                    data = file.read(size) + data
        except OSError:
            return
        found = data.splitlines(keepends=True)
        skipped = found[: max(0, len(found) - count)]
        self._position = place + sum(map(len, skipped))
        said = (_TIME.match(line.decode(errors="replace")) for line in reversed(skipped))
        self._time = next((f"{time[1]} {time[2]}" for time in said if time), "")

    def read(self, *, to_the_end: bool) -> Iterator[LogLine]:
        """Yields new lines, whose times never fall."""
        untimed = list[str]()  # before the first that says a time
        for text in self._read(to_the_end=to_the_end):
            if said := _TIME.match(text):
                self._time = max(self._time, f"{said[1]} {said[2]}")
            if not self._time:
                untimed.append(text)
                continue
            yield from (LogLine(self.source, each, self._time) for each in [*untimed, text])
            untimed.clear()
        if untimed:
            self._time = self._written()
            yield from (LogLine(self.source, each, self._time) for each in untimed)

    def _read(self, *, to_the_end: bool) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n") and not to_the_end:
                        return
                    self._position += len(line)
                    yield line.decode(errors="replace").rstrip("\r\n")
        except FileNotFoundError:
            return

    def _written(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._path.stat().st_mtime))
