"""Defines a rank's work besides its model, in every role that trains or scores.

Rank 0 decides, follows data and bus, and keeps the record. The other ranks wait for its decisions:
it sends them messages while it waits for others, since without any they would time out.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from relax_hpc.errors import TrainingError
from relax_hpc.roles.training.unlearned import Teller
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.progress import PaceMeter, account, step_line
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.trainer.training_engine import SkippedUpdate

log = logging.getLogger(__name__)

TURN_S = 30.0
"""Interval of rank 0's messages to the other ranks while it waits."""
MAX_IN_A_ROW = 3
"""Consecutive skipped updates that end the actor."""
Floats = npt.NDArray[np.float32]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def nothing() -> None: ...


class Duties(Generic[T_co]):
    """The duties of ranks other than 0: none. Rank 0's class overrides what its role needs.

    All ranks call the methods in the same order.
    """

    def next_task(self, step: int, timers: Timers) -> T_co | None:
        """Returns what to train on or score next, as rank 0 decides.

        None ends a role that scores, and interrupts the actor: engines need the weights first, or
        the job is about to end. Rank 0 waits until there is work, or the waiting ranks are due to
        hear from it.

        Args:
            step: of the model; 0 if it never changes.
            timers: of the step, which note the wait.
        """
        return None

    def put(self, scored: Sequence[Floats], *, version: int = -1) -> None:
        """Takes the [tokens] scores of every row dealt out in the last round, in order.

        Args:
            version: of the weights that scored them, if they change.
        """

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """Takes the rank's part in publishing the policy. Rank 0's result counts: whether engines
        are left that need the weights."""
        return False

    def note_skipped(self, step: int, skip: SkippedUpdate) -> None:
        """Logs the samples that prevented an update, and their places."""

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class StepRecord:
    """Logs a trainer's steps, on rank 0.

    Args:
        teller: of what is not learned from, if anything is sampled.
    """

    def __init__(self, events: EventWriter, num_steps: int, teller: Teller | None = None) -> None:
        self._events, self._num_steps, self._pace = events, num_steps, PaceMeter()
        self._teller = teller

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        """Logs a step with its speed; `num_tokens` is among the fields."""
        fields = fields | timers.seconds
        fields |= account(seconds := timers.elapsed, fields)
        fields["tokens_per_s"] = fields["num_tokens"] / seconds
        eta_s = self._pace.end_step(seconds, self._num_steps - step)
        self._events.emit("step", step=step, eta_s=eta_s, **fields)
        self._events.emit("phases", step=step, phases=timers.phases)
        log.info("%s", step_line({"step": step, **fields}, self._num_steps, eta_s))
        for line in self._teller.note({"step": step, **fields}) if self._teller else ():
            log.warning("%s", line)


def note_skipped(
    events: EventWriter, step: int, skip: SkippedUpdate, places: Mapping[int, str]
) -> None:
    """Logs a skipped update; `places` are guid -> place of its rows."""
    events.emit("skipped", step=step, **fields_of(skip, places))
    log.warning("step %d: update skipped: %s", step, line_of(skip, places))


def fields_of(skip: SkippedUpdate, places: Mapping[int, str]) -> dict[str, Any]:
    """Returns the fields of a `skipped` event.

    Args:
        places: guid -> place of its rows.
    """
    return {
        "reason": skip.reason,
        "in_a_row": skip.in_a_row,
        "num_samples": skip.num_samples,
        "samples": [s._asdict() | {"shard": places.get(s.guid)} for s in skip.samples],
    }


def line_of(skip: SkippedUpdate, places: Mapping[int, str]) -> str:
    if not skip.samples:
        return f"{skip.reason}, but every sample's loss is: it is the model's own gradient"
    named = ", ".join(
        f"{s.guid}/{s.sibling} ({s.what})" + (f" in {places[s.guid]}" if s.guid in places else "")
        for s in skip.samples
    )
    more = skip.num_samples - len(skip.samples)
    return f"{skip.reason}: guid/sibling {named}" + (f" and {more} more" if more else "")


def stop_if_stuck(skip: SkippedUpdate) -> None:
    """Ends the actor if it keeps skipping updates, or can never do one.

    Raises:
        TrainingError: MAX_IN_A_ROW updates were skipped in a row, or the model gives no sample
            finite logprobs.
    """
    if skip.is_model:
        raise TrainingError(
            f"{skip.reason}: the model gives none of the batch's samples finite logprobs, so its "
            "weights are broken, by an update before; nothing was published or saved since, and a "
            "restart begins at the newest checkpoint: lower actor.optimizer.lr"
        )
    if skip.in_a_row >= MAX_IN_A_ROW:
        raise TrainingError(
            f"{skip.in_a_row} updates in a row were skipped: "
            f"{line_of(skip, {})}; none of them changed the weights, and none was saved: a restart "
            "begins at the newest checkpoint: look at the samples, or lower actor.optimizer.lr"
        )


def stop_or_go_on(duties: Duties[object], step: int, skip: SkippedUpdate | None) -> None:
    """Logs a skipped update; called before the update's results are used.

    Raises:
        TrainingError: see `stop_if_stuck`.
    """
    if skip is not None:
        duties.note_skipped(step, skip)
        stop_if_stuck(skip)


class Waits(NamedTuple):
    """Message of rank 0 that it is still waiting."""


class Turns:
    """Sends rank 0's messages to the others, which are in `heard` or come to it."""

    def __init__(self, world: World) -> None:
        self._world, self._told_at = world, time.monotonic()

    def tell(self) -> None:
        """Reports that rank 0 is waiting, if a message is due; cheap to call."""
        if time.monotonic() >= self._told_at + TURN_S:
            self._told_at = time.monotonic()
            self._world.bcast(Waits())


def heard(world: World, value: T) -> T:
    """Returns rank 0's `value` on every rank, once there is one; collective."""
    told: T | Waits = Waits()
    while isinstance(told, Waits):
        told = world.bcast(value)
    return told
