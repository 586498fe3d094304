"""Do engines and trainer compute the same model? Asked once a start, before anything is learned."""

import logging
import math
from collections.abc import Callable
from typing import Protocol

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import MismatchError

log = logging.getLogger(__name__)


class Worst(Protocol):
    """The token of which the two differ most."""

    @property
    def guid(self) -> int: ...
    @property
    def sibling(self) -> int: ...
    @property
    def token(self) -> int:
        """Of the trajectory, from 0."""
        ...

    @property
    def engine(self) -> float:
        """Its logprob, nats."""
        ...

    @property
    def trainer(self) -> float: ...


class Gap(Protocol):
    """Between logprobs of tokens that the trainer's own policy sampled, nats."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def mean(self) -> float: ...
    @property
    def max(self) -> float: ...
    @property
    def k3(self) -> float: ...
    @property
    def worst(self) -> Worst: ...


class Trainer(Protocol):
    step: int

    def engine_gap(self) -> Gap | None:
        """Of what was accumulated; None if it has no such tokens. Collective."""
        ...


class LogprobCheck:
    """Called by every rank before each update, until there was a batch to judge by.

    Only policy 0 is judged for good. An engine that was given a later one may still hold keys and
    values of prompts that older ones computed, so after a resume the same is but a warning.

    Args:
        note: of rank 0: the step, the policy that sampled, what was found, the limit.
        place: of rank 0: where a prompt group is, and which engine made it.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        note: Callable[[int, Gap, float], None] | None = None,
        place: Callable[[int], tuple[str, str]] | None = None,
    ) -> None:
        self._config, self._trainer, self._note, self._place = config, trainer, note, place
        self._is_done = config.algorithm.logprob_check == "off"

    def __call__(self) -> None:
        """Raises:
        MismatchError: the engines' logprobs and the trainer's differ by more than rounding.
        """
        if self._is_done:
            return
        gap = self._trainer.engine_gap()
        # Of numbers that are not finite the update is skipped, with the samples named.
        if gap is None or not math.isfinite(gap.mean):
            return
        self._is_done = True
        limit = self._config.max_logprob_gap
        if self._note:
            self._note(self._trainer.step, gap, limit)
        if gap.mean <= limit:
            return
        if self._config.algorithm.logprob_check == "stop" and self._trainer.step == 0:
            raise MismatchError(self._line(gap, limit))
        if self._note:
            log.warning("%s", self._line(gap, limit))

    def _line(self, gap: Gap, limit: float) -> str:
        config, worst = self._config, gap.worst
        shard, engine = self._place(worst.guid) if self._place else ("", config.rollout.engine)
        engine_type = config.rollout.engine_args.get("dtype", config.model.dtype)
        weights = f", weights in {config.weights.quantize}" * (config.weights.quantize != "none")
        return (
            f"engines ({engine}, {engine_type}{weights}) and trainer (Megatron-core, "
            f"{config.model.dtype}) compute different models: the logprobs of {gap.num_tokens} "
            f"tokens that policy {self._trainer.step} sampled differ by {gap.mean:.3g} nats on "
            f"average (largest {gap.max:.3g}, k3 {gap.k3:.3g}), and rounding explains "
            f"{limit:g} (algorithm.max_logprob_gap); most for token {worst.token} of guid/sibling "
            f"{worst.guid}/{worst.sibling}{f' in {shard}' * bool(shard)}: {worst.engine:.4f} by "
            f"the engine, {worst.trainer:.4f} by the trainer. A restart does not help: compare "
            "model.path, model.weights and rollout.engine_args, or set algorithm.logprob_check"
        )
