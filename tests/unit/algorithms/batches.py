"""Random batches of short rows, padded; and their packed form, as parts of an algorithm see it."""

import threading
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

GARBAGE = (float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class Batch:
    """B rows of at most L tokens, float64."""

    mask: np.ndarray
    """[B, L] bool."""
    columns: dict
    """[B, L] each, `logprobs` among them; anything off the mask."""
    lengths: np.ndarray
    """[B] tokens of a row, trained ones and others."""
    groups: np.ndarray
    """[B]"""


@dataclass(frozen=True)
class Packed:
    """Rows end to end."""

    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    groups: torch.Tensor
    columns: dict
    logprobs: torch.Tensor
    places: tuple
    """(row, token) of each packed token; of padding, None."""

    def with_columns(self, **columns):
        return replace(self, columns={**self.columns, **columns})

    def over(self, anchor):
        return self.with_columns(anchor_logprobs=self.columns[f"{anchor}_logprobs"])


@cache
def random_batch(seed):
    """Rows of 1 to 6 tokens; some are wholly masked, some in part, some have no advantage."""
    random = np.random.default_rng(seed)
    rows, longest = int(random.integers(1, 6)), int(random.integers(1, 7))
    lengths = random.integers(1, longest + 1, rows)
    lengths[random.integers(rows)] = 1
    there = np.arange(longest) < lengths[:, None]
    mask = there & (random.random(there.shape) < 0.8) & (random.random((rows, 1)) < 0.85)
    rollout = np.log(random.uniform(0.02, 0.95, there.shape))
    near = lambda base: np.minimum(base + random.normal(0, 0.35, there.shape), -1e-3)  # noqa: E731
    old = near(rollout)
    columns = {
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "logprobs": near(old),
        "ref_logprobs": near(rollout),
        "advantages": np.repeat(
            random.normal(0, 1, (rows, 1)) * (random.random((rows, 1)) < 0.85), longest, axis=1
        ),
    }
    return Batch(mask, columns, lengths, np.sort(random.integers(0, 3, rows)))


def pack(batch, rows=None, *, garbage=False, padding=2):
    """The rows in the given order, then padding; `garbage` stands in all columns off the mask."""
    rows = list(range(len(batch.lengths))) if rows is None else list(rows)
    places = [(row, at) for row in rows for at in range(batch.lengths[row])]
    ids = [number for number, row in enumerate(rows) for _ in range(batch.lengths[row])]

    def column(values, filler):
        return torch.tensor([values[place] for place in places] + [filler] * padding)

    mask = column(batch.mask, False)
    columns = {name: column(values, 0.0).double() for name, values in batch.columns.items()}
    if garbage:
        for number, values in enumerate(columns.values()):
            waste = torch.tensor(GARBAGE).double().roll(number).repeat(len(mask))[: len(mask)]
            values.copy_(torch.where(mask, values, waste))
    return Packed(
        mask,
        torch.tensor(ids + [len(rows)] * padding),
        torch.tensor([*batch.groups[rows], -1]),
        {name: values for name, values in columns.items() if name != "logprobs"},
        columns["logprobs"],
        (*places, *[None] * padding),
    )


def tokens_of(columns, logprobs=None, ids=None, mask=None):
    """Tokens end to end with these columns: all trained, of one sequence, unless that is given."""
    some = next(iter(columns.values()))
    ids = torch.zeros(len(some), dtype=torch.int64) if ids is None else ids
    mask = torch.ones(len(some), dtype=torch.bool) if mask is None else mask
    groups = torch.zeros(int(ids.max()) + 1, dtype=torch.int64)
    return Packed(mask, ids, groups, columns, some if logprobs is None else logprobs, ())


LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
STALE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def expected_gradient(costs, sampler, reference=REFERENCE):
    """Gradient of the logits over all four tokens, weighed by who samples them.

    `costs` is a function of their logprobs, and the tokens; reference and teacher are one.
    """
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    mu = logprobs.exp().detach() if sampler == "policy" else STALE
    columns = {"rollout_logprobs": mu.log(), "advantages": torch.zeros(4)}
    columns |= dict.fromkeys(("ref_logprobs", "teacher_logprobs"), reference.log())
    (mu * costs(logprobs, tokens_of(columns, logprobs))).sum().backward()
    return logits.grad


def divergence_gradient(forward=False):
    """Gradient of KL(pi || reference), or of the other way round."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    gap = logprobs - REFERENCE.log()
    (-(REFERENCE * gap).sum() if forward else (logprobs.exp() * gap).sum()).backward()
    return logits.grad


def slopes(total, at, step=1e-6):
    """Finite differences of a sum by each of the numbers that it is of."""
    moves = step * torch.eye(len(at), dtype=at.dtype)
    return [(total(at + move) - total(at - move)) / (2 * step) for move in moves]


def padded(packed, values, like):
    """[B, L] of packed values on trained tokens, 0 elsewhere."""
    result = np.zeros(like.mask.shape)
    for place, value, trained in zip(
        packed.places, values.tolist(), packed.loss_mask.tolist(), strict=True
    ):
        if trained:
            result[place] = value
    return result


def on_ranks(shares, work):
    """What `work(share, total)` returns on as many ranks as there are shares, all at once."""
    ranks = len(shares)
    given, results, barrier = [None] * ranks, [None] * ranks, threading.Barrier(ranks, timeout=20)

    def run(rank):
        def total(tensor):
            given[rank] = tensor
            barrier.wait()
            summed = sum(given[1:], given[0])
            barrier.wait()
            return summed

        try:
            results[rank] = work(shares[rank], total)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results), "a rank failed"
    return results


def alone(tensor):
    """`total` of a single rank."""
    return tensor
