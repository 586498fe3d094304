"""Keeps links to all of a user's runs in their own state folder.

Links need no lock; broken ones are skipped.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError, nearest
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import FREQUENT, read_events

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig

RUNS = Path("runs")
"""Default run root, below the working directory."""
_DIGEST = 10
_OF_OTHERS = "only its owner can do this; others look at it, e.g. relax-hpc status"


def folder() -> Path:
    """Returns the links' folder: `relax-hpc/runs` below the XDG state folder."""
    said = os.environ.get("XDG_STATE_HOME", "")
    base = Path(said) if Path(said).is_absolute() else Path.home() / ".local" / "state"
    return base / "relax-hpc" / "runs"


def default_root() -> Path | None:
    """$RELAX_RUN_ROOT, the default run root."""
    said = os.environ.get("RELAX_RUN_ROOT", "")
    try:
        return Path(said).expanduser().absolute() if said else None
    except RuntimeError:
        raise ConfigError(
            f"$RELAX_RUN_ROOT = {said!r}: no home folder is known for ~; write the path out"
        ) from None


def below_default_root(config: "JobConfig") -> "JobConfig":
    """Sets `run_root` to $RELAX_RUN_ROOT, unless the job names one."""
    root = default_root()
    if root is None or "run_root" in config.model_fields_set:
        return config
    return config.model_copy(update={"run_root": root})


def remember(run_dir: Path) -> None:
    """Links a submitted run, if possible."""
    run_dir = run_dir.absolute()
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        links = folder()
        links.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = links / f"{run_dir.name}@{_digest(run_dir)}"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir)
        _forget_removed(links)


def everywhere() -> list[Path]:
    """Returns every run that can be found from here, each once."""
    roots = [RUNS.absolute(), *filter(None, [default_root()])]
    near = [run for root in roots for run in _entries(root)]
    seen = dict[Path, Path]()
    for run in [*near, *_follow_links()]:
        if is_run(run):
            seen.setdefault(run.resolve(), run)
    return list(seen.values())


def find_runs(name: str) -> list[Path]:
    """Returns runs of a name outside the working directory."""
    if not name or Path(name).name != name:
        return []
    root = default_root()
    near = [root / name] if root else []
    if near and is_run(near[0]):
        return near
    linked = [run for run in _follow_links() if run.name == name and is_run(run)]
    return list({run.resolve(): run for run in linked}.values())


def run_dir_of(run: str) -> Path:
    """Finds a run's directory by path or name.

    Raises:
        ConfigError: there is no such run, or several.
    """
    if (found := find_run(run)) is not None:
        return found
    names = {each.name for each in everywhere()}
    hint = nearest(run, names) or "give its directory, or a name that ls shows"
    raise ConfigError(f"{run}: no such run; {hint}")


def own_run_dir_of(run: str) -> Path:
    """Finds a run as `run_dir_of`, for writing into it or running its code.

    Raises:
        ConfigError: as `run_dir_of`.
        LaunchError: it is another user's, or others may write there.
    """
    run_dir = run_dir_of(run)
    permissions.check_change(RunPaths(run_dir), _OF_OTHERS)
    return run_dir


def find_run(run: str) -> Path | None:
    """Finds a run by its directory or name: below runs/, below $RELAX_RUN_ROOT, or wherever it was
    submitted. None if there is no such run.

    Raises:
        ConfigError: several runs submitted elsewhere have that name, or it is a folder that this
            user may not read.
    """
    places = (Path(run), RUNS / run)
    for place in places:
        if is_run(place):
            return place
    found = find_runs(run)
    if len(found) > 1:
        several = ", ".join(map(str, found))
        raise ConfigError(f"{run}: is the name of several runs; give one of {several}")
    if not found:
        for place in places:
            _check_visible(place)
    return found[0] if found else None


def _check_visible(folder: Path) -> None:
    try:
        RunPaths(folder).config.stat()
    except PermissionError as error:
        raise ConfigError(permissions.refusal(error)) from error
    except OSError:  # nothing is there
        return


def longest_save(model: Path) -> tuple[str, float | None]:
    """Returns the longest save of a model in the newest run that has made one.

    Returns:
        That run in words, and the seconds; None if unknown.
    """
    newest = dict[float, Path]()
    for run in everywhere():
        with suppress(OSError, ValueError, KeyError, TypeError):  # somebody else's, or an old one
            config = RunPaths(run).config
            if Path(json.loads(config.read_text(encoding="utf-8"))["model"]["path"]) == model:
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


def _follow_links() -> list[Path]:
    """Returns the links' targets, newest first."""
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
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:_DIGEST]


def _forget_removed(links: Path) -> None:
    for link in links.iterdir():
        if link.is_symlink():
            run = link.readlink()
            if run.parent.is_dir() and not run.exists():
                link.unlink(missing_ok=True)
