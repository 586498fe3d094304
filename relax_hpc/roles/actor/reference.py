"""The reference inside the actor: scores what is about to be trained on, and may be renewed."""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)


class ReferencePolicy(Protocol):
    """A further policy of the training engine; collective over its ranks."""

    def logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """[tokens] nats of each trajectory; `micro_batches` index `trajectories`."""
        ...

    def refresh(self) -> None:
        """The policy of now becomes the reference."""
        ...


class HybridReference:
    """The reference of one actor rank.

    Args:
        policy: in the actor's engine.
        refresh_every: steps between renewals; 0 never.
        events: rank 0's.
    """

    def __init__(
        self, policy: ReferencePolicy, *, refresh_every: int, events: EventWriter | None
    ) -> None:
        self._policy, self._refresh_every, self._events = policy, refresh_every, events

    def fill(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[Trajectory]:
        """The trajectories with `ref_logprobs`."""
        found = self._policy.logprobs(trajectories, micro_batches)
        return [
            trajectory._replace(ref_logprobs=logprobs)
            for trajectory, logprobs in zip(trajectories, found, strict=True)
        ]

    def end_step(self, step: int) -> None:
        """Renews the reference if it is time to: before a checkpoint of the step is saved."""
        if self._refresh_every and step % self._refresh_every == 0:
            self._policy.refresh()
            if self._events:
                self._events.emit("reference", step=step)
                log.info("policy %d is the reference from now on", step)
