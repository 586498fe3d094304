"""The functions that tests of text in a model that sees run on ranks of a pool."""

import time

import torch
from megatron_worker import _state, gradients, leave_grid, logprobs, open_trainer, train, weights

__all__ = ["gradients", "logprobs", "open_trainer", "train", "weights"]


def open_trainers(configs):
    """Several trainers in one process, by a thread each."""
    leave_grid()
    torch.set_num_threads(1)
    trainers = []
    for config in configs:
        open_trainer(config)
        trainers.append(_state["trainer"])
    _state["trainers"] = trainers


def seconds(rows, advantages, repeats):
    """[trainers][repeats, 2] seconds of a step, by the clock and of this thread; trainers take
    turns."""
    taken = [[] for _ in _state["trainers"]]
    for turn in range(repeats):
        order = range(len(taken))
        for number in reversed(order) if turn % 2 else order:
            _state["trainer"] = _state["trainers"][number]
            begin = time.perf_counter(), time.thread_time()
            train(rows, advantages)
            now = time.perf_counter(), time.thread_time()
            taken[number].append([last - first for first, last in zip(begin, now, strict=True)])
    return taken
