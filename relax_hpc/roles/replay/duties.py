"""The work of the ranks that train a step again, besides training: batches as they were planned."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from relax_hpc.bus.plan import PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.portions import Batch, Portion
from relax_hpc.roles.training.steps import NoLog
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)


class OtherRank(NoLog):
    """Nobody decides and nobody is given weights; see `loop.Duties`."""

    def next_portion(self, step: int, timers: Timers) -> Portion | None:
        return None

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        return False

    def finish(self) -> None: ...
    def close(self) -> None: ...


class Rank0(OtherRank):
    """Hands out the batches of the plan, and notes the steps.

    Args:
        planned: the portions of all batches of the run, in order.
    """

    def __init__(
        self, config: RunConfig, reader: Reader, planned: Sequence[PlanRecord], events: EventWriter
    ) -> None:
        self._config, self._reader, self._events = config, reader, events
        self._planned = {(record.step, record.portion): record for record in planned}
        self._batch, self._step, self._portion = Batch(config, reader), 0, 0

    def next_portion(self, step: int, timers: Timers) -> Portion | None:
        if step != self._step:
            self._batch, self._step, self._portion = Batch(self._config, self._reader), step, 0
        with timers("read"):
            dealt = self._batch.deal(self._planned[step, self._portion])
        self._portion += 1
        return dealt

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        fields = self._batch.describe(step) | fields | timers.seconds
        self._events.emit("step", step=step, **fields)
        log.info("step %d | loss %g | grad norm %g", step, fields["loss"], fields["grad_norm"])
