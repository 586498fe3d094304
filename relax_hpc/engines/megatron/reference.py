"""The reference policy inside the trainer: their weights take turns in the one model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relax_hpc.engines.megatron.hf import hf_weights
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.schema import Trajectory

_NAME = "reference"


class SwappedReference:
    """The reference of one trainer rank. Its methods are collective over the trainer's ranks.

    Args:
        trainer: which holds model.path still.
        path: Hugging Face folder of the reference, of the same shape; None takes what the trainer
            holds.

    Raises:
        ConfigError: `path` is not the trainer's model with other numbers.
    """

    def __init__(self, trainer: MegatronTrainer, path: Path | None = None) -> None:
        self._trainer, self._bank = trainer, trainer.bank
        if path is None:
            self._bank.keep(_NAME)
            return
        with self._bank.lent():
            hf_weights.load(self._bank.chunks, path)
            self._bank.keep(_NAME)

    def logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.float32]]:
        """As `MegatronScorer.forward_logprobs`, under the reference's weights."""
        with self._bank.swapped(_NAME, version=self._trainer.step):
            return self._trainer.forward_logprobs(trajectories, micro_batches)

    def refresh(self) -> None:
        """The trainer's policy of now is the reference from here on; checkpoints hold it."""
        self._bank.keep(_NAME, lasting=True)
