"""Everything this package raises on purpose. Anything else is a bug: let it crash."""

import difflib
import re
import reprlib
from collections.abc import Iterable

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40
_MOST_CHARACTERS = 700
"""Limit of what a program of somebody else's raised, so that what stands beside it stays whole."""


def show(value: object) -> str:
    """Returns a given value as a message repeats it: on one line, and not all of it if it is
    long."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not write it out
        return f"a number of {value.bit_length()} bits"
    return _short.repr(value)


def first_line(error: BaseException) -> str:
    """Returns a library's message, as far as it fits into a message of one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def ends_of(text: str, most: int) -> str:
    """Returns a text of at most so many characters: of a longer one the beginning, and the end with
    most of the room, since what went wrong stands there."""
    first = most // 4
    return text if len(text) <= most else f"{text[:first]} ... {text[first + 5 - most :]}"


def type_and_line(error: BaseException) -> str:
    """Returns what a program of somebody else's raised, in a line."""
    said = " ".join(ends_of(str(error), 10 * _MOST_CHARACTERS).split())
    return f"{type(error).__name__}: {ends_of(said, _MOST_CHARACTERS) or type(error).__name__}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Asks whether one of these names was meant; "" if none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def none_of(name: str, known: Iterable[str]) -> str:
    """Says which names there are, and which of them may have been meant."""
    close = nearest(name, known := list(known))
    return f"is none of {', '.join(known)}" + f"; {close}" * bool(close)


def without_number(error: BaseException) -> str:
    """Returns what an error says, without the number that the system has for it."""
    return re.sub(r"\[Errno -?\d+\] ", "", str(error))


class RelaxError(Exception):
    """Base class. The command line prints its message on one line and exits with code 2."""

    is_final = False
    """Whether a task that ends with it would end so again: it is not started again."""


class ConfigError(RelaxError, ValueError):
    """The job, or a file it names, is wrong. The message names key, value and remedy."""

    is_final = True


class MediumError(ConfigError):
    """An image, a video or a sound cannot be used. The message names row, medium and remedy."""


class BusError(RelaxError, RuntimeError):
    """A shard, a log or a plan is missing, torn, foreign or of another format."""


class FencedError(BusError):
    """A newer incarnation took over; this one must publish nothing more and end."""


class DamagedError(BusError):
    """A file of the bus is missing, torn or corrupt: what it held has to be made again."""


class EngineError(RelaxError, RuntimeError):
    """A rollout engine refused, failed or cannot be reached. The message names its URL."""


class EngineLostError(EngineError):
    """An engine gave no answer, or broke off: another one, or the same later, may do better."""


class EngineFaultError(EngineLostError):
    """An engine answered that it failed (HTTP 5xx), or what cannot be read."""


class DeadlyRequestError(EngineError):
    """Engines end, one after the other, when they are asked for this."""


class EngineUnfitError(EngineError):
    """An engine cannot run where it is to, or not as the job says: a package is missing, a setting
    is refused."""

    is_final = True


class MediaMissingError(EngineError):
    """An engine cannot read the files of media: they have to be sent along."""


class RewardError(RelaxError, RuntimeError):
    """The job's reward fails too often to go on. The message names samples and reasons."""

    is_final = True


class SpreadError(RelaxError, RuntimeError):
    """Responses to a prompt hardly ever differ in reward: there is nothing to learn from them."""

    is_final = True


class TrainingError(RelaxError, RuntimeError):
    """Training cannot go on by itself. The message says what was found, and in which samples."""


class GpuMemoryError(RelaxError, RuntimeError):
    """A GPU has no room for what a role computes. The message says what would take less."""


class MismatchError(TrainingError):
    """Engines and trainer do not compute the same model, and no restart will change that."""

    is_final = True


class CheckpointError(RelaxError, RuntimeError):
    """A checkpoint cannot be written, or is not whole. The message names the file."""


class SnapshotError(RelaxError, RuntimeError):
    """Weights cannot be written for engines that load files. The message names the folder."""


class LaunchError(RelaxError, RuntimeError):
    """Slurm, MPI or the local launcher did not do what was asked."""


class PeerTimeoutError(RelaxError, TimeoutError):
    """Another role did not show up in time. The message names it and what was waited for."""
