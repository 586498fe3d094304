"""The lines a run's tasks wrote, each with the task that wrote it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.launch import record
from relax_hpc.launch.script import batch_log
from relax_hpc.paths import ComponentPaths
from relax_hpc.roles.table import joining

_POLL_S = 0.5


class LogLine(NamedTuple):
    source: str
    """"<component>-<rank>", or "job" for the script that starts and restarts the steps."""
    text: str


def lines(run_dir: Path, component: str | None = None) -> Iterator[LogLine]:
    """Yields the lines so far, source by source; `component` leaves only its
    tasks, or with "job" the script.

    Raises:
        ConfigError: not a run directory, nothing was started in it, or it has no such component.
    """
    yield from follow(run_dir, component, until=lambda: True)


def follow(
    run_dir: Path, component: str | None = None, *, until: Callable[[], bool]
) -> Iterator[LogLine]:
    """Yields the lines so far, then others as they come; ends after the round in which `until`
    holds.

    Raises:
        ConfigError: not a run directory, nothing was started in it, or it has no such component.
    """
    tails: dict[Path, _Tail] = {}
    while True:
        for source, path in sources(run_dir, component):  # engines that are added have logs, too
            tails.setdefault(path, _Tail(source, path))
        over = until()  # asked first, so that lines written before it became true are read
        for tail in tails.values():
            yield from tail.read(to_the_end=over)
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
    script_log = ("job", batch_log(launched.folder, launched.leader))
    found = [script_log] if component in (None, "job") else []
    for each in launched.components:
        if component not in (None, each.name):
            continue
        for task in range(each.tasks):
            left = ComponentPaths(each.folder, launched.leader)
            source = f"{each.name}-{task}"
            found += [(source, left.log(task, "out")), (source, left.log(task, "err"))]
    for name in joining() if component is None else {component} & set(joining()):
        for folder in sorted((launched.folder / name).glob(f"{name}-*")):
            found += [(folder.name, folder / "log.out"), (folder.name, folder / "log.err")]
    return found


class _Tail:
    def __init__(self, source: str, path: Path) -> None:
        self._source, self._path, self._position = source, path, 0

    def read(self, *, to_the_end: bool) -> Iterator[LogLine]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        if not to_the_end:  # half a line is left for the next round
            data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        for line in data.decode(errors="replace").splitlines():
            yield LogLine(self._source, line)
