"""Runs micro-batches through the pipeline's stages and back, by Megatron-core's schedules.

T = tokens of a micro-batch; with context parallelism a rank computes T / size of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_hpc.algorithms.composition import TokenWeighing, counts_the_same
from relax_hpc.runtime import heartbeat
from relax_hpc.trainer.megatron import grid
from relax_hpc.trainer.megatron.features import Features
from relax_hpc.trainer.megatron.layers.attention import PackedRows
from relax_hpc.trainer.megatron.packing import MicroBatch, MicroBatchWork, TokenDocuments


def backward(
    chunks: Sequence[DistributedDataParallel],
    works: Sequence[MicroBatchWork],
    loss: Callable[[Tensor, MicroBatchWork], Tensor],
    features: Features | None = None,
) -> None:
    """Adds the gradient of every micro-batch's loss to the buffers of the chunks.

    Args:
        loss: (the last stage's hidden states, work) -> [] loss; called there only.
        features: of the media of the works, on the first stage.
    """

    def forward_step(works: Iterator[MicroBatchWork], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        work = next(works)
        hidden = _hidden(chunk, work.micro_batch, features, work.objective.weights)
        return hidden, partial(outcome, work)

    def outcome(work: MicroBatchWork, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        # Tokens are counted by the caller: a batch may come in several portions.
        return loss(hidden, work), torch.zeros((), dtype=torch.int, device=hidden.device), None

    _run(chunks, works, forward_step)


def forward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    values: Callable[[Tensor, MicroBatch], Tensor],
    features: Features | None = None,
) -> list[npt.NDArray[np.float32]]:
    """Returns [T] float32 `values` of every micro-batch, on all stages; without gradient.

    Args:
        values: (the last stage's hidden states, micro-batch) -> [T].
        features: as in `backward`.
    """
    found = forward_on_last_stage(chunks, micro_batches, values, features)
    return grid.arrays_from_last_stage([part.float().cpu().numpy() for part in found])


def forward_on_last_stage(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    values: Callable[[Tensor, MicroBatch], Tensor],
    features: Features | None = None,
) -> list[Tensor]:
    """Does as `forward`; the values stay on the device of the last stage, others get none."""

    def forward_step(
        micro_batches: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        micro_batch = next(micro_batches)
        return _hidden(chunk, micro_batch, features), partial(outcome, micro_batch)

    def outcome(micro_batch: MicroBatch, hidden: Tensor, *, non_loss_data: bool) -> Tensor:
        assert non_loss_data
        return values(hidden, micro_batch)

    with torch.no_grad():
        return _run(chunks, micro_batches, forward_step, forward_only=True)


def _hidden(
    chunk: Any,  # noqa: ANN401
    micro_batch: MicroBatch,
    features: Features | None,
    weights: TokenWeighing = counts_the_same,
) -> Tensor:
    heartbeat.beat()
    rows = PackedRows.of(micro_batch.lengths, micro_batch.token_ids.device, grid.context_group())
    if chunk.config.num_moe_experts is not None:
        own = _choose_routed if chunk.config.sequence_parallel else grid.own_part
        documents = TokenDocuments.of(micro_batch, weights(micro_batch))
        rows.documents = replace(documents, index=own(documents.index))
        rows.routes = None if micro_batch.routes is None else own(micro_batch.routes)
    if features is not None:
        rows.seen = features.select_seen(
            micro_batch, is_sequence_parallel=chunk.config.sequence_parallel
        )
    hidden: Tensor = chunk(
        grid.own_part(micro_batch.token_ids)[None],
        grid.own_part(micro_batch.position_ids)[None],
        None,
        packed_seq_params=rows,
    )
    return hidden


def _choose_routed(values: Tensor) -> Tensor:
    """[T, ...] -> the tokens that this rank routes under sequence parallelism."""
    return grid.own_tokens(grid.own_part(values))


def _run(
    chunks: Sequence[torch.nn.Module],
    works: Sequence[Any],
    forward_step: Callable[[Iterator[Any], torch.nn.Module], tuple[Tensor, Any]],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Runs the pipeline; returns the last stage's result for every work, in order."""
    if not works:
        return []
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(works) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(works),
        seq_length=1,  # lengths vary: stages tell each other
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return found
