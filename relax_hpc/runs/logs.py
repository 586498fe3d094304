"""Merges the logs of a run's tasks by time, and shortens them for people."""

import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from relax_hpc.errors import ConfigError, nearest
from relax_hpc.launch import record
from relax_hpc.launch.record import LaunchedComponent
from relax_hpc.launch.script import batch_log
from relax_hpc.roles.table import joining
from relax_hpc.runtime.paths import ComponentPaths

_POLL_S = 0.5
_BLOCK = 1 << 16
_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")


class LogLine(NamedTuple):
    source: str
    """"<component>-<rank>", "<component> on <node>" before its tasks have their own logs, or "job"
    for the script that supervises the steps."""
    text: str
    time: str
    """"YYYY-MM-DD HH:MM:SS"; a line without a time has the previous one's."""


class Logs:
    """The logs of a run so far."""

    def __init__(
        self, run_dir: Path, component: str | None = None, *, last: int | None = None
    ) -> None:
        """Args:
            component: only its tasks; "job" for the script.
            last: only this many of the existing lines, the newest.

        Raises:
            ConfigError: not a run directory, nothing was started in it, or it has no such
                component.
        """
        self._run_dir, self._component, self._last = run_dir, component, last
        self._tails: dict[Path, _Tail] = {}
        self._find()

    @property
    def sources(self) -> set[str]:
        return {tail.source for tail in self._tails.values()}

    def read(self, *, to_the_end: bool) -> Iterator[LogLine]:
        """Yields new lines; holds back an incomplete one unless `to_the_end`."""
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
    """Yields lines as they come, until a round after which `until` holds.

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
    """Lists the log files of a run with their sources; some may not exist yet.

    Raises:
        ConfigError: the run has no such component, or is none.
    """
    launched = record.read(run_dir)
    known = [*(each.name for each in launched.components), *joining(), "job"]
    if component is not None and component not in known:
        raise ConfigError(
            f"--component {component}: this run has no such component; "
            + (nearest(component, known) or f"use {', '.join(known)}")
        )
    scripts = [("job", batch_log(launched.folder, leader)) for leader in launched.leaders]
    found = scripts if component in (None, "job") else []
    for each in launched.components:
        if component not in (None, each.name):
            continue
        found += find_printed(each, ("out", "err"))
    for name in joining() if component is None else {component} & set(joining()):
        for folder in sorted((launched.folder / name).glob(f"{name}-*")):
            found += [(folder.name, folder / "log.out"), (folder.name, folder / "log.err")]
    return found


def find_printed(
    component: LaunchedComponent,
    streams: Sequence[Literal["out", "err"]],
    ranks: Sequence[int] = (),
) -> list[tuple[str, Path]]:
    """Lists output files with their sources: of all tasks or `ranks`, and per node of failed
    starts."""
    left, name = ComponentPaths(component.folder, component.leader), component.name
    places = [(f"{name}-{rank}", str(rank)) for rank in ranks or range(component.tasks)]
    places += [(f"{name} on {node}", node) for node in left.nodes()]
    return [(who, left.log(place, stream)) for who, place in places for stream in streams]


class _Tail:
    """Reads a file incrementally."""

    def __init__(self, source: str, path: Path) -> None:
        self.source = source
        self._path, self._position, self._time = path, 0, ""

    def skip_but(self, count: int) -> None:
        """Skips to the last `count` lines, keeping the time of the skipped ones."""
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
        """Yields new lines, whose times never decrease."""
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


_OURS = re.compile(r"\S+ (?P<time>\S+) \S+ \S+ (?P<level>[A-Z]+) relax_hpc[\w.]*: (?P<text>.*)")
_SCRIPTS = re.compile(r"\d{4}-\d\d-\d\dT(?P<time>\d\d:\d\d:\d\d) (?P<text>.*)")
_STEP = re.compile(r"step +\d+/\d+ \|")
_WARNING = re.compile(
    r"(/\S*(-packages|lib/python[\d.]*)/\S+:\d+: \w*Warning: |<frozen [\w.]+>:\d+: \w*Warning: )"
)
_LIBRARY_LOG = re.compile(r"(WARNING|INFO|DEBUG):(?!relax_hpc)[\w.]+:")
_LEAST_FIRST = ("staleness", "epoch", "KL", "MFU", "loss")
"""Parts of a step's line that a narrow terminal drops, in this order."""


class Filter:
    """Removes the warnings of libraries."""

    def __init__(self) -> None:
        self.left_out = 0
        """Number of removed warnings."""
        self._inside = set[str]()

    def __call__(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yields other lines; indented lines below a warning belong to it."""
        for line in lines:
            if _WARNING.match(line.text) or _LIBRARY_LOG.match(line.text):
                self.left_out += 1
                self._inside.add(line.source)
            elif line.source in self._inside and line.text[:1] in (" ", "\t"):
                continue
            else:
                self._inside.discard(line.source)
                yield line


def short(line: LogLine, width: int) -> str:
    """Formats a line with source and time of day; shortens a step's to `width` columns if
    possible."""
    found = _OURS.match(line.text) or _SCRIPTS.match(line.text)
    if found is None:
        return f"{line.source}: {line.text}"
    head, text = f"{line.source}: {found['time']} ", found["text"]
    level = found.groupdict().get("level", "INFO")
    if level != "INFO":
        return f"{head}{level} {text}"
    return head + (fit(text, width - len(head)) if _STEP.match(text) else text)


def fit(text: str, width: int) -> str:
    """Drops parts of a step's line until it fits."""
    parts = text.split(" | ")
    for drop in (*_LEAST_FIRST, "GiB"):
        if len(" | ".join(parts)) <= width:
            break
        parts = [re.sub(r"^(\d[\d.]* s) \(.*\)$", r"\1", part) for part in parts]  # phases first
        if len(" | ".join(parts)) > width:
            parts = [part for part in parts if not _is(part, drop)]
    if len(" | ".join(parts)) > width:
        parts = [re.sub(r"^trained (\S+ tok/s)$", r"\1", part) for part in parts]
    return " | ".join(parts)


def _is(part: str, name: str) -> bool:
    return part.startswith(f"{name} ") or part.endswith(f" {name}")
