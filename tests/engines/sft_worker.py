"""The functions that test_sft_trainer runs on ranks of a pool."""

from megatron_worker import _state


class DistWorld:
    """The pool's ranks as a World."""

    def allgather(self, value):
        import torch.distributed as dist

        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def _share(documents):
    from relax_hpc.roles.sft.rank0 import deal

    trainer = _state["trainer"]
    return deal(trainer._megatron, documents)[trainer.dp_rank]


def _accumulate(documents):
    from relax_hpc.algorithms.composition import Objective
    from relax_hpc.algorithms.sft import cross_entropy

    share = _share(documents)
    _state["trainer"].accumulate(share.rows, share.micro_batches, Objective(cross_entropy))
    return len(share.micro_batches)


def heldout_loss(documents):
    from relax_hpc.roles.sft import loop as sft

    return sft.heldout_loss(DistWorld(), _state["trainer"], _share(documents))


def fine_tune(documents):
    """Micro-batches of a step, and what it reported."""
    count = _accumulate(documents)
    return count, _state["trainer"].update()


def gradients(documents):
    """Returns gradients of the mean over the trained tokens of all ranks, by Hugging Face names."""
    from megatron.core.distributed import finalize_model_grads

    trainer = _state["trainer"]
    _accumulate(documents)
    finalize_model_grads(trainer._wrapped, force_all_reduce=True)
    total = sum(document.num_trained for document in documents)
    parameters = [p for chunk in trainer._chunks for p in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = (parameter.main_grad / total).to(parameter.dtype)
    found = {name: t.numpy().copy() for name, t in trainer.named_weights()}
    for parameter, data in zip(parameters, weights, strict=True):
        parameter.data = data
    return found
