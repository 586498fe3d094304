"""The work of the actor's ranks besides rank 0 for the others: they help to publish."""

from collections.abc import Iterator

from torch import Tensor

from relax_hpc.roles.dealing.portions import Portion
from relax_hpc.roles.training.steps import NoLog
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.ranks import TrainerRanks


class OtherRank(NoLog):
    """The duties of such a rank; see `loop.Duties`."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks

    def next_portion(self, step: int, timers: Timers) -> Portion | None:
        return None

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        self._ranks.publish(version, tensors)
        return False

    def finish(self) -> None: ...
    def close(self) -> None: ...
