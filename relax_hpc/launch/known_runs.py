"""The runs of a user, wherever they lie: a link to each in the user's own state folder.

Links need no lock, and one whose run is gone, or cannot be seen from here, is passed over.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from relax_hpc.paths import RunPaths
from relax_hpc.telemetry import history
from relax_hpc.telemetry.events import FREQUENT, read_events

RUNS = Path("runs")
"""Where runs lie by default, below the folder of the command."""
_DIGEST = 10


def folder() -> Path:
    """Where the links are: `relax-hpc/runs` below the XDG folder for states."""
    said = os.environ.get("XDG_STATE_HOME", "")
    base = Path(said) if Path(said).is_absolute() else Path.home() / ".local" / "state"
    return base / "relax-hpc" / "runs"


def default_root() -> Path | None:
    """The folder that $RELAX_RUN_ROOT names for runs whose job names none."""
    said = os.environ.get("RELAX_RUN_ROOT", "")
    return Path(said).expanduser().absolute() if said else None


def remember(run_dir: Path) -> None:
    """Links a run that was submitted; where that cannot be done, the run is known by its folder."""
    run_dir = run_dir.absolute()
    links = folder()
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        links.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = links / f"{run_dir.name}@{_digest(run_dir)}"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir)
        _forget_removed(links)


def everywhere() -> list[Path]:
    """Every run that can be found from here, each once."""
    roots = [RUNS.absolute(), *filter(None, [default_root()])]
    near = [run for root in roots for run in _entries(root)]
    seen = dict[Path, Path]()
    for run in [*near, *_linked()]:
        if is_run(run):
            seen.setdefault(run.resolve(), run)
    return list(seen.values())


def called(name: str) -> list[Path]:
    """The runs of a name, without those below the folder of the command."""
    if not name or Path(name).name != name:
        return []
    root = default_root()
    near = [root / name] if root else []
    if near and is_run(near[0]):
        return near
    linked = [run for run in _linked() if run.name == name and is_run(run)]
    return list({run.resolve(): run for run in linked}.values())


def longest_save(model: Path) -> tuple[str, float | None]:
    """Tells how long saves of a model took in the newest run that has made one.

    Returns:
        That run in words, and the seconds of its longest save; None where none is known.
    """
    newest = dict[float, Path]()
    for run in everywhere():
        with suppress(OSError, ValueError, KeyError, TypeError):  # somebody else's, or an old one
            config = RunPaths(run).config
            if Path(json.loads(config.read_text())["model"]["path"]) == model:
                newest[config.stat().st_mtime] = run
    for _, run in sorted(newest.items(), reverse=True):
        with suppress(OSError):
            seconds = history.longest_save_s(read_events(RunPaths(run).events_folder, but=FREQUENT))
            if seconds is not None:
                return f"run {run.name} (of the same model)", seconds
    return "this run", None


def is_run(folder: Path) -> bool:
    try:
        return RunPaths(folder).config.is_file()
    except OSError:  # somebody else's
        return False


def _linked() -> list[Path]:
    """Where the links lead, the newest first."""
    try:
        links = [link for link in _entries(folder()) if link.is_symlink()]
        links.sort(key=lambda link: link.lstat().st_mtime_ns, reverse=True)
        return [link.readlink() for link in links]
    except (OSError, RuntimeError):
        return []


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _digest(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:_DIGEST]


def _forget_removed(links: Path) -> None:
    """Removes links to runs that are gone from a folder that is there."""
    for link in links.iterdir():
        if link.is_symlink():
            run = link.readlink()
            if run.parent.is_dir() and not run.exists():
                link.unlink(missing_ok=True)
