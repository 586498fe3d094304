"""The functions that tests of a trainer that sees run on ranks of a pool."""

import megatron_worker
from megatron_worker import _state, gradients, logprobs, train, weights
from seen_rows import pixels_of

__all__ = ["gradients", "logprobs", "train", "weights"]


def _pixels(wanted):
    _state["read"] += [row.media[medium].canonical_xxh3 for row, medium in wanted]
    return [pixels_of(row.media[medium]) for row, medium in wanted]


def open_trainer(config):
    megatron_worker.open_trainer(config=config)
    _state["read"] = []
    _state["trainer"].see_by(_pixels)


def read():
    """Numbers of the media whose pixels this rank has read since it was opened."""
    return [int.from_bytes(digest, "little") for digest in _state["read"]]


def optimizer_elements():
    """Elements of weights that this rank's optimizer has moments of."""
    return sum(
        main.numel()
        for part in _state["trainer"]._optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for main in group["params"]
    )
