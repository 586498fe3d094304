"""The functions that tests of low-rank adaptation run on ranks of a pool."""

import torch
import torch.distributed as dist
from megatron_worker import _state

from relax_hpc.comm.bucket import BucketPlan, views


def gathered(bucket_bytes, again=False):
    """(specs, what rank 0 is brought of the weights, bucket by bucket, fixed buckets left out).

    Args:
        again: by the gather that was made before.
    """
    trainer = _state["trainer"]
    specs = trainer.weight_specs()
    plan = BucketPlan.of(specs, bucket_bytes)
    if not again:
        _state["gather"] = trainer.gather(bucket_bytes)
        _state["flat"] = [torch.empty(size, dtype=torch.uint8) for size in plan.sizes]
    gather = _state["gather"]
    gather.begin()
    if dist.get_rank():
        gather.give(plan.fixed)
        return specs, {}
    found = {}
    for index, bucket in enumerate(plan.buckets):
        if index not in plan.fixed:
            flat = _state["flat"][index]
            gather.fill(index, flat)
            for spec, tensor in zip(bucket, views(flat, bucket), strict=True):
                found[spec.name] = tensor.float().numpy().copy()
    return specs, found


def held():
    """Elements of gradient buffers, and of what Adam has, on this rank."""
    trainer = _state["trainer"]
    buffers = [b for c in trainer._wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]
    mains = [
        main
        for part in trainer._optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for main in group["params"]
    ]
    return sum(b.grad_data.numel() for b in buffers), sum(main.numel() for main in mains)


def reference_logprobs(rows, micro_batches):
    """Logprobs under weights that were kept before training."""
    return _state["trainer"].kept_logprobs("reference", rows, micro_batches)


def keep(folder):
    _state["trainer"].keep("reference", folder)
