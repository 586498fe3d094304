"""A micro-batch on its way through the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from relax_hpc.algorithms.composition import Objective
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.schema import Row


@dataclass
class Work:
    """A micro-batch, its loss and its logprobs; kept until the end of the step."""

    micro_batch: MicroBatch
    objective: Objective
    samples: Sequence[Row]
    """Rows of the micro-batch, in packed order."""
    number: int
    """Place among the rank's micro-batches of the step, from 0."""
    logprobs: Tensor | None = None
    """[T] without gradient, of the last forward pass, where the last stage is."""
