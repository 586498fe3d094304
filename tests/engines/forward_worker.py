"""The functions that tests of swapped weights and of the reference run on ranks of a pool."""

import numpy as np
from megatron_worker import _shares, _state, job, train, valued

__all__ = ["job", "train"]


def _everything():
    """Weights, gradients, main parameters and moments of this rank, copied."""
    trainer = _state["trainer"]
    found = {}
    for index, chunk in enumerate(trainer._wrapped):
        for number, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
            found[f"{index}/{number}/weights"] = buffer.param_data.clone()
            found[f"{index}/{number}/gradient"] = buffer.grad_data.clone()
    for part in trainer._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                found[f"main/{len(found)}"] = parameter.detach().clone()
        for state in part.optimizer.state.values():
            for name, value in state.items():
                found[f"{name}/{len(found)}"] = value.clone()
    return found


def _equal(first, second):
    return [name for name in first if not first[name].equal(second[name])]


def swap(rows, advantages, fail=False):
    """Keeps the weights, trains, swaps them in and out; what differs, and the bank's bytes."""
    trainer = _state["trainer"]
    first = _everything()
    trainer.bank.keep("first")
    train(rows, advantages)
    ((_, micro_batches),) = _shares(rows)
    from megatron_worker import surrogate

    from relax_hpc.algorithms.composition import Objective

    trainer.accumulate(valued(rows, advantages), micro_batches, Objective(surrogate()))
    before = _everything()
    inside = {}
    try:
        for version in (trainer.step, trainer.step, None):
            with trainer.bank.swapped("first", version=version):
                inside = _everything()
                if fail:
                    raise KeyError("inside")
    except KeyError:
        assert fail
    after = _everything()
    swapped = [name for name in before if name.endswith("/weights")]
    numel = sum(first[name].numel() for name in swapped)
    return {
        "not swapped in": [name for name in swapped if not inside[name].equal(first[name])],
        "trained": any(not before[name].equal(first[name]) for name in swapped),
        "changed": _equal(before, after),
        "bytes of a weight": trainer.bank.nbytes / numel,
    }


def open_reference(path=None):
    from relax_hpc.roles.actor.reference import Reference

    _state["reference"] = Reference(_state["trainer"], path, refresh_every=1)


def ref_logprobs(rows):
    """The rank's own rows -> {row: logprobs}."""
    ((_, micro_batches),) = _shares(rows)
    found = _state["reference"].fill(rows, micro_batches)
    return {row: found[row].columns["ref_logprobs"] for batch in micro_batches for row in batch}


def refresh():
    _state["reference"].end_step(_state["trainer"].step)


def open_scorer(config):
    """A model that only scores; what it holds per weight besides the weights, in bytes."""
    import torch
    import torch.distributed as dist
    from megatron_worker import FixedWorld

    from relax_hpc.engines.megatron.scorer import MegatronScorer

    world = FixedWorld(dist.get_rank(), dist.get_world_size())
    _state["scorer"] = MegatronScorer(
        config.model, config.actor, world, torch.device("cpu"), temperature=config.temperature
    )
    parameters = [p for chunk in _state["scorer"]._chunks for p in chunk.parameters()]
    return [p.grad for p in parameters if p.grad is not None or hasattr(p, "main_grad")]


def scorer_logprobs(rows, micro_batches):
    return _state["scorer"].forward_logprobs(rows, micro_batches)


def train_with_kl(rows, advantages, coefficient):
    """A step whose loss has a KL term, by this rank's reference; its metrics."""
    from relax_hpc.algorithms.composition import Objective
    from relax_hpc.algorithms.kl import Kl
    from relax_hpc.algorithms.part import LossOutput

    trainer = _state["trainer"]
    ((_, micro_batches),) = _shares(rows)
    scored = [row.columns["ref_logprobs"] for row in _state["reference"].fill(rows, micro_batches)]
    rows = [
        row.with_columns(ref_logprobs=values if len(values) else np.zeros(len(row.token_ids), "f4"))
        for row, values in zip(rows, scored, strict=True)
    ]

    def loss(logprobs, micro_batch):
        kl = Kl(name="k3").of_tokens(logprobs, micro_batch)
        metrics = {name: values.sum() for name, values in kl.metrics.items()}
        return LossOutput(0.0 * logprobs.sum() + coefficient * kl.loss.sum(), metrics)

    trainer.accumulate(valued(rows, advantages), micro_batches, Objective(loss))
    return trainer.update()
