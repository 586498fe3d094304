"""A micro-batch on its way through the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.composition import Objective
from relax_hpc.algorithms.part import LossOutput, Tokens
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.schema import FinishReason, Row, Trajectory

_MADE_UP_TOKENS = 512


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


def _sum_of_logprobs(logprobs: Tensor, tokens: Tokens) -> LossOutput:
    return LossOutput(logprobs.sum(), {})


LOGPROBS = Objective(_sum_of_logprobs, reads_old=False)
"""Something to compute a gradient of."""


def made_up_rows(num_tokens: int, vocab_size: int) -> list[Trajectory]:
    """Returns rows that fill a micro-batch of `num_tokens`, of the usual form and no meaning."""
    length = min(num_tokens, _MADE_UP_TOKENS)
    count = num_tokens // length
    token_ids = np.random.default_rng(0).integers(vocab_size, size=(count, length), dtype=np.int32)
    return [
        Trajectory(
            guid=guid, sibling=0, prompt_index=0, seed=0, token_ids=ids, prompt_len=1,
            loss_mask=np.ones(length, np.uint8), version_runs=np.zeros((0, 2), np.int32),
            finish=FinishReason.STOP, reward=0.0,
        )
        for guid, ids in enumerate(token_ids)
    ]  # fmt: skip
