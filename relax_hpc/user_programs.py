"""Programs that a user named. A place in one is "file.py:name" or "package.module:name"."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from relax_hpc.errors import type_and_line

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""Seconds that the import of a program may take, and then what it names to be made."""
_TELL_S = 10.0
ORIGIN = ".origin"
"""Name of a file beside the copy of a program, which says the path of what was copied."""
_PACKAGE = Path(__file__).parent
_MESSAGE_CHARACTERS = 200
"""Limit of what a call raised, so that what stands beside it stays whole: a term, the line."""


def absolute_place(name: str) -> str:
    """The same place in a file wherever a process is started; other names as they are."""
    place = place_of(name)
    return name if place is None else f"{place[0].absolute()}:{place[1]}"


def place_of(name: str) -> tuple[Path, str] | None:
    """The file and the name in it, of "file.py:name"; None of other names."""
    file, colon, attribute = name.rpartition(":")
    return (Path(file), attribute) if colon and file.endswith(".py") else None


def imported(place: str) -> Any:  # noqa: ANN401
    """Runs the program and returns what stands at a place in it.

    The copy of a program finds the modules that were copied with it, and all else where the program
    was: its `__file__` is that.

    Raises:
        TimeoutError: the import has not ended within `PATIENCE_S`.
        Exception: whatever the import raises, but for SystemExit, which would end who imports.
    """
    module, _, attribute = place.rpartition(":")
    with bounded(module, "the import"):
        if module.endswith(".py"):
            return _named(_run(Path(module)), Path(module).name, attribute)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # behind Python's own: a `code.py` there must not be taken
        return _named(importlib.import_module(module), module, attribute)


def _named(found: object, said: str, attribute: str) -> Any:  # noqa: ANN401
    try:
        return getattr(found, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, vars(found), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"{said} has no attribute {attribute!r}{hint}") from None


@contextmanager
def bounded(place: str, doing: str = "making it") -> Iterator[None]:
    """Says now and then where a program of the user's is, and ends what it does in the end; in the
    main thread only, which signals interrupt.

    Args:
        place: of what is run.
        doing: what is done, e.g. "the import".

    Raises:
        TimeoutError: that takes longer than `PATIENCE_S`.
        RuntimeError: it called `sys.exit`, which would end who runs it.
    """
    try:
        with _watched(place, doing):
            yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


@contextmanager
def _watched(place: str, doing: str) -> Iterator[None]:
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


def raised(error: BaseException) -> str:
    """Says what a program of the user's raised as it was imported or made, and in which line."""
    line = _line_of(traceback.walk_tb(error.__traceback__), newest=-1)
    return type_and_line(error) + (f" ({line})" if line else "")


def raised_in_call(error: BaseException) -> str:
    """Says what a function of the user's raised as it was called, and in which line of it."""
    return type_and_line(error)[:_MESSAGE_CHARACTERS] + _line_of_call(error)


def _line_of_call(error: BaseException) -> str:
    """Names the innermost line of the function that was called, or of a file beside it.

    Empty if it is one of this package, or had returned. A package that is installed may be called.
    """
    frames = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    called = list(itertools.dropwhile(lambda place: place[0] == places[0][0], places))
    if not called or called[0][0].is_relative_to(_PACKAGE):
        return ""
    file, line = [each for each in called if each[0].parent == called[0][0].parent][-1]
    return f" ({file.name}:{line})"


def _line_of(frames: Iterable[tuple[FrameType, int]], newest: int) -> str:
    """The line in the user's own files that is run, as "file.py:3"; "" if none is.

    Args:
        frames: of the stack, with their lines.
        newest: index of the innermost.
    """
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [place for place in places if not _is_of_others(place[0])]
    return f"{own[newest][0].name}:{own[newest][1]}" if own else ""


def _is_of_others(file: Path) -> bool:
    """Whether a file is Python's, a package's that is installed, or ours."""
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
        module.__file__ = origin.read_text()
        sys.path.insert(0, str(path.parent))  # before the folder of the command, maybe theirs
    sys.path.append(str(Path(str(module.__file__)).parent))  # files beside it can be imported
    spec.loader.exec_module(module)
    return module
