"""The functions that tests of a trainer that sees run on ranks of a pool."""

from collections import Counter

import forward_worker
import megatron_worker
import torch
from forward_worker import scorer_logprobs
from megatron_worker import _shares, _state, gradients, logprobs, train, weights
from seen_rows import pixels_of

from relax_hpc.engines.megatron.vision import host_memory
from relax_hpc.models.audio.tower import Tower as Ears

__all__ = ["gradients", "logprobs", "scorer_logprobs", "train", "weights"]


def _pixels(wanted):
    _state["read"] += [row.media[medium].canonical_xxh3 for row, medium in wanted]
    return [pixels_of(row.media[medium]) for row, medium in wanted]


def open_trainer(config):
    megatron_worker.open_trainer(config=config)
    _state["read"], _state["encoded"], _state["places"] = [], Counter(), set()
    _state["trainer"].see_by(_pixels)
    encoder = _state["trainer"]._encoder
    encode = encoder.encode

    def placed(*args, **given):
        if features := encode(*args, **given):
            _state["places"].add(features.is_in_host_memory)
        return features

    encoder.encode = placed
    for tower in {sense.tower for sense in _state["trainer"]._encoder._senses.values()}:
        tower.register_forward_pre_hook(_note)


def _note(tower, given):
    """Counts what a tower is given: patches [n, ...], or a spectrum [128, n]."""
    what = "heard" if isinstance(tower, Ears) else "seen"
    _state["encoded"][what, torch.is_grad_enabled()] += given[0].shape[what == "heard"]


def open_scorer():
    """A model that only scores, beside the trainer, of the same job."""
    forward_worker.open_scorer(_state["config"])
    _state["scorer"].see_by(_pixels)


def keep():
    _state["trainer"].keep("first")


def kept_logprobs(rows):
    """Does as `logprobs` under the weights that were kept."""
    ((_, micro_batches),) = _shares(rows)
    found = _state["trainer"].kept_logprobs("first", rows, micro_batches)
    return {row: found[row] for batch in micro_batches for row in batch}


def read():
    """Numbers of the media whose pixels this rank has read since it was opened."""
    return [int.from_bytes(digest, "little") for digest in _state["read"]]


def encoded():
    """Patches, and mel frames, that went through this rank's towers since it was opened: [what is
    seen, heard], without and then with a graph."""
    return [[_state["encoded"][what, graph] for what in ("seen", "heard")] for graph in (0, 1)]


def places():
    """Whether features were in host memory, of all that this rank had."""
    return _state["places"]


def exchange_few_rows():
    host_memory._GATHERED_BYTES = 10_000


def media_of_micro_batches(rows):
    """How many media there are in each micro-batch of this rank."""
    ((_, micro_batches),) = _shares(rows)
    return [sum(len(rows[row].media) for row in batch) for batch in micro_batches]


def optimizer_elements():
    """Elements of weights that this rank's optimizer has moments of."""
    return sum(
        main.numel()
        for part in _state["trainer"]._optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for main in group["params"]
    )
