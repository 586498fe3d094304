"""The moment when gradients are summed over data-parallel ranks, with `overlap_grad_reduce`.

A sum may begin once a gradient is final: in the last micro-batch of the batch's last portion.
Without that setting Megatron sums everything at the end of the batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatron.core.distributed import DistributedDataParallel


@contextmanager
def portion(chunks: Sequence[DistributedDataParallel], *, last: bool) -> Iterator[None]:
    """Gradients of the micro-batches that run inside are summed on the way only if `last`."""
    if not chunks[0].ddp_config.overlap_grad_reduce:
        yield
        return
    until_last = [chunk.no_sync for chunk in chunks]  # for all micro-batches but the last
    with ExitStack() as stack:
        if last:
            chunks[0].config.no_sync_func = until_last if len(chunks) > 1 else until_last[0]
        else:
            chunks[0].config.no_sync_func = None
            for no_sync in until_last:
                stack.enter_context(no_sync())
        yield


def start_rest(chunks: Sequence[DistributedDataParallel]) -> None:
    """Starts the sums that no micro-batch started; Megatron only waits for them, later."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            is_waited_for = chunk.ddp_config.overlap_grad_reduce and not group.is_first_batch
            if is_waited_for and group.grad_reduce_handle is None:
                group.start_grad_sync()
