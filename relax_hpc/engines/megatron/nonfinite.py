"""Names the samples that made a loss or a gradient infinite or not a number, after it was."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.work import Work
from relax_hpc.engines.training_engine import Sample, Skip

_NAMED = 8


class _Found(NamedTuple):
    """The samples of one data-parallel rank that are not finite."""

    named: list[Sample]
    num_samples: int
    without_logprobs: int
    """Samples among `num_samples` whose logprobs are not finite."""
    trained: int
    """Samples with a token to train on, finite or not."""


def explain(works: Sequence[Work], reason: str, in_a_row: int) -> Skip:
    """Looks at all that was passed over. Collective over all ranks.

    Samples without finite logprobs come first: others may be as they are through a batch's mean.
    """
    samples = list(_samples(works)) if grid.is_last_stage() else []
    samples.sort(key=lambda sample: sample.what != "logprobs")
    group = mpu.get_data_parallel_group()
    mine = _Found(
        samples[:_NAMED],
        len(samples),
        sum(sample.what == "logprobs" for sample in samples),
        sum(bool(sample.loss_mask[1:].any()) for work in works for sample in work.samples),
    )
    ranks = [
        _Found([Sample(*sample) for sample in named], *counts)
        for named, *counts in all_gather_json(mine, group)
    ]
    first_of_each = sorted(
        ((place, sample) for found in ranks for place, sample in enumerate(found.named)),
        key=lambda found: (found[1].what != "logprobs", found[0]),
    )
    named = tuple(sample for _, sample in islice(first_of_each, _NAMED))
    without = sum(found.without_logprobs for found in ranks)
    skip = Skip(
        reason,
        named,
        sum(found.num_samples for found in ranks),
        in_a_row,
        is_model=without == sum(found.trained for found in ranks) > 0,
    )
    said = grid.from_last_stage(skip._asdict())
    return Skip(**said | {"samples": tuple(Sample(*sample) for sample in said["samples"])})


def _samples(works: Sequence[Work]) -> Iterator[Sample]:
    dp_rank = mpu.get_data_parallel_rank()
    for work in works:
        for document, what in _documents(work):
            sample = work.samples[document]
            yield Sample(sample.guid, sample.sibling, dp_rank, work.number, what)


def _documents(work: Work) -> Iterator[tuple[int, str]]:
    """Number and fault of every document that has one."""
    lengths = work.micro_batch.lengths
    if _fault(work, torch.ones_like(work.micro_batch.loss_mask)) is None:
        return
    for document, end in enumerate(torch.tensor(lengths).cumsum(0).tolist()[: len(work.samples)]):
        alone = torch.zeros_like(work.micro_batch.loss_mask)
        alone[end - lengths[document] : end] = True
        if fault := _fault(work, alone):
            yield document, fault


def _fault(work: Work, inside: Tensor) -> str | None:
    """Returns what is not finite of the tokens [T] `inside`; the others are as good as absent."""
    assert work.logprobs is not None
    given = work.micro_batch
    mask = given.loss_mask & inside
    cleared = {name: values.where(inside, 0) for name, values in given.columns.items()}
    logprobs = work.logprobs.where(inside, 0).requires_grad_()
    if not logprobs[mask].isfinite().all():
        return "logprobs"
    with torch.enable_grad():
        loss = work.objective.loss(logprobs, replace(given, loss_mask=mask, columns=cleared)).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
    if not loss.isfinite():
        return "loss"
    return None if gradient.isfinite().all() else "gradient"
