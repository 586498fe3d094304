"""Imports programs that a user named, as "file.py:name" or "package.module:name"."""

import difflib
import importlib
import importlib.util
import itertools
import logging
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from relax_hpc.errors import type_and_line
from relax_hpc.runtime.files import permissions

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""Longest time to import a program, and then to make the object it names."""
_TELL_S = 10.0
ORIGIN = ".origin"
"""File beside the copy of a program, which holds the path of the original."""
_PACKAGE = Path(__file__).parents[2]


def absolute_place(name: str) -> str:
    """Makes "file.py:name" independent of the working directory; leaves other names."""
    place = place_of(name)
    return name if place is None else f"{place[0].absolute()}:{place[1]}"


def place_of(name: str) -> tuple[Path, str] | None:
    """Splits "file.py:name"; None for other names."""
    file, colon, attribute = name.rpartition(":")
    return (Path(file), attribute) if colon and file.endswith(".py") else None


def import_place(place: str) -> Any:  # noqa: ANN401
    """Imports a program and returns the object at a place in it.

    The copy of a program finds the modules that were copied with it, and all else where the
    original was: its `__file__` is the original's.

    Raises:
        TimeoutError: the import has not ended within `PATIENCE_S`.
        Exception: any error of the import but SystemExit, which would end this process.
    """
    module, _, attribute = place.rpartition(":")
    with limit_time(module, "the import"):
        if module.endswith(".py"):
            return _get_attribute(_run(Path(module)), Path(module).name, attribute)
        _look_beside(Path.cwd())
        return _get_attribute(importlib.import_module(module), module, attribute)


def _get_attribute(found: object, said: str, attribute: str) -> Any:  # noqa: ANN401
    try:
        return getattr(found, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, vars(found), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"{said} has no attribute {attribute!r}{hint}") from None


@contextmanager
def limit_time(place: str, doing: str = "making it") -> Iterator[None]:
    """Logs now and then the line a user's program is at, and interrupts it after `PATIENCE_S`; only
    in the main thread, which signals interrupt.

    Args:
        doing: e.g. "the import".

    Raises:
        TimeoutError: it takes longer than `PATIENCE_S`.
        RuntimeError: it called `sys.exit`.
    """
    try:
        with _watch(place, doing):
            yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


@contextmanager
def _watch(place: str, doing: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begun = time.monotonic()

    def look(_: int, frame: FrameType | None) -> None:
        passed = time.monotonic() - begun
        if passed >= PATIENCE_S:
            raise TimeoutError(f"{doing} takes longer than {PATIENCE_S:g} s")
        line = _line_of(traceback.walk_stack(frame), newest=0)
        log.warning("%s: %s takes %.0f s so far, now at %s", place, doing, passed, line or "?")

    before = signal.signal(signal.SIGALRM, look)
    others = signal.setitimer(signal.ITIMER_REAL, _TELL_S, _TELL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def describe_error(error: BaseException) -> str:
    """Describes an error of a user's program while it was imported or made, with its line."""
    line = _line_of(traceback.walk_tb(error.__traceback__), newest=-1)
    return type_and_line(error) + (f" ({line})" if line else "")


def describe_call_error(error: BaseException) -> str:
    """Describes an error of a user's function while it was called, with its line."""
    return type_and_line(error) + _line_of_call(error)


def _line_of_call(error: BaseException) -> str:
    """Names the innermost line of the called function, or of a file beside it.

    Empty if it is in this package, or the function had returned. Installed packages are skipped.
    """
    frames = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    called = list(itertools.dropwhile(lambda place: place[0] == places[0][0], places))
    if not called or called[0][0].is_relative_to(_PACKAGE):
        return ""
    file, line = [each for each in called if each[0].parent == called[0][0].parent][-1]
    return f" ({file.name}:{line})"


def _line_of(frames: Iterable[tuple[FrameType, int]], newest: int) -> str:
    """Returns the running line in the user's own files, as "file.py:3"; "" if none.

    Args:
        frames: of the stack, with their lines.
        newest: index of the innermost.
    """
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [place for place in places if not _is_of_others(place[0])]
    return f"{own[newest][0].name}:{own[newest][1]}" if own else ""


def _is_of_others(file: Path) -> bool:
    """Whether a file belongs to Python, an installed package, or this package."""
    places = (_PACKAGE, *map(Path, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    return not file.is_absolute() or any(file.is_relative_to(place) for place in places)


def _run(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    origin = path.with_name(ORIGIN)
    if origin.exists():
        module.__file__ = origin.read_text(encoding="utf-8")
        sys.path.insert(0, str(path.parent))  # before the folder of the command, maybe theirs
        _look_beside(Path(str(module.__file__)).parent)
    else:
        sys.path.append(str(path.parent))  # files beside it can be imported
    spec.loader.exec_module(module)
    return module


def _look_beside(folder: Path) -> None:
    """Adds a folder behind Python's own modules: a `code.py` there must not shadow the standard
    one."""
    finder = _Beside(folder)
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)


@dataclass(frozen=True)
class _Beside(MetaPathFinder):
    """Finds modules in a folder, unless others could have planted them."""

    folder: Path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds top-level modules only: a package is checked as a whole."""
        if path is not None:
            return None
        found = PathFinder.find_spec(fullname, [str(self.folder)], target)
        if found is None:
            return None
        files = found.submodule_search_locations or (found.origin, found.cached)
        for file in files:
            if file and Path(file).exists() and (doubt := permissions.doubt_of(Path(file))):
                raise ModuleNotFoundError(
                    f"module {fullname} in {self.folder} is not imported: {doubt}, and others may "
                    f"have put there what would run as you; chmod -R go-w {self.folder}, or "
                    "install it",
                    name=fullname,
                )
        return found
