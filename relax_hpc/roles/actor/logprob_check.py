"""Do engines and trainer compute the same model? Asked once a start, before anything is learned."""

import logging
import math

from relax_hpc.config.run import RunConfig
from relax_hpc.engines.training_engine import Gap, TrainingEngine
from relax_hpc.errors import MismatchError
from relax_hpc.roles.actor.rank0 import Rank0

log = logging.getLogger(__name__)


class LogprobCheck:
    """Called by every rank before each update, until there was a batch to judge by.

    Only policy 0 is judged for good. An engine that was given a later one may still hold keys and
    values of prompts that older ones computed, so after a resume the same is but a warning.

    Args:
        rank0: keeps the record and knows where rows come from; None on other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainingEngine,
        rank0: Rank0 | None = None,
    ) -> None:
        self._config, self._trainer, self._rank0 = config, trainer, rank0
        self._is_done = False

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
        if self._rank0:
            self._rank0.compared(self._trainer.step, gap, limit)
        if gap.mean <= limit:
            return
        if self._trainer.step == 0:
            raise MismatchError(self._line(gap, limit))
        if self._rank0:
            log.warning("%s", self._line(gap, limit))

    def _line(self, gap: Gap, limit: float) -> str:
        config, worst = self._config, gap.worst
        nowhere = ("", config.rollout_pool.kind)
        shard, engine = self._rank0.place_of(worst.guid) if self._rank0 else nowhere
        engine_type = config.rollout_pool.args.get("dtype", config.model.dtype)
        weights = f", weights in {config.weights.quantize}" * (config.weights.quantize != "none")
        return (
            f"engines ({engine}, {engine_type}{weights}) and trainer (Megatron-core, "
            f"{config.model.dtype}) compute different models: the logprobs of {gap.num_tokens} "
            f"tokens that policy {self._trainer.step} sampled differ by {gap.mean:.3g} nats on "
            f"average (largest {gap.max:.3g}, k3 {gap.k3:.3g}), and rounding explains "
            f"{limit:g} (weights.max_logprob_gap); most for token {worst.token} of guid/sibling "
            f"{worst.guid}/{worst.sibling}{f' in {shard}' * bool(shard)}: {worst.engine:.4f} by "
            f"the engine, {worst.trainer:.4f} by the trainer. A restart does not help: compare "
            "model.path, model.weights and engines.rollout.args, or raise the limit"
        )
