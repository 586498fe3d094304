"""Packed attention, alone and over context-parallel ranks."""

import numpy as np
import pytest
import torch
from trainers import VOCAB, assert_close

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron.layers import attention_kernels
from relax_hpc.trainer.megatron.layers.attention import PackedRange, PackedRows, runs

CPU = torch.device("cpu")
LENGTHS = [13, 1, 30, 4, 16]


@pytest.fixture(scope="module")
def pair(ranks):
    return ranks[2]


class Group:
    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def dense(query, key, value, run):
    """Document by document with the mask written out, in float64."""
    outs, at, of = [], 0, 0
    for queries, keys in zip(run.query_lengths, run.key_lengths, strict=True):
        q = query[at : at + queries].double().transpose(0, 1)
        k, v = (x[of : of + keys].double().transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        at, of = at + queries, of + keys
    return torch.cat(outs)


def test_a_rank_attends_from_its_two_chunks_to_the_start_of_their_documents():
    """64 tokens of documents 13, 1, 30, 4, 16 for 2 ranks: chunks of 16, the second rank's are
    16..31, inside the third document (14..43), and 32..47, its end and the whole fourth."""
    first, second = runs(LENGTHS, 2, 1)
    assert first == PackedRange((0, 16), (14, 32), (16,), (18,))
    assert second == PackedRange((16, 32), (14, 48), (12, 4), (30, 4))
    (whole,) = runs(LENGTHS)
    assert whole == PackedRange((0, 64), (0, 64), tuple(LENGTHS), tuple(LENGTHS))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_padded_blocks_give_what_the_written_out_mask_gives(size):
    attend = attention_kernels.choose("sdpa", CPU, torch.float32)
    for rank in range(size):
        rows = PackedRows.of(LENGTHS, CPU, Group(size, rank) if size > 1 else None)
        for span in rows.spans:
            torch.manual_seed(rank)
            made = [
                torch.randn(sum(lengths), heads, 8)
                for lengths, heads in (
                    (span.run.query_lengths, 4),
                    (span.run.key_lengths, 2),
                    (span.run.key_lengths, 2),
                )
            ]
            results = []
            for how in (lambda q, k, v, s=span: attend(q, k, v, s, 0.3),
                        lambda q, k, v, s=span: dense(q, k, v, s.run)):  # fmt: skip
                inputs = [x.clone().requires_grad_() for x in made]
                out = how(*inputs)
                out.square().sum().backward()
                results.append([out.detach(), *(x.grad for x in inputs)])
            for mine, theirs in zip(*results, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=1e-5)


def test_context_parallel_ranks_get_the_logprobs_and_gradients_of_one(pair, folder):
    rng = np.random.default_rng(0)
    batch = {
        "folder": folder,
        "documents": [rng.integers(0, VOCAB, length) for length in LENGTHS],
        "upstream": rng.normal(size=sum(LENGTHS)).astype(np.float32),
    }
    alone, expected = pair.packed_gradients(**batch)[0]
    for values, gradients in pair.packed_gradients(**batch, context_parallel=True):
        assert_close(values, alone)
        assert_close(gradients, expected)


@pytest.mark.parametrize("kernel", ["cudnn", "varlen"])
def test_a_kernel_that_does_not_work_here_is_refused_with_the_one_that_does(kernel):
    with pytest.raises(ConfigError, match=rf'actor\.advanced\.attention = "{kernel}".*"sdpa"'):
        attention_kernels.choose(kernel, CPU, torch.float32)


def by_hand(hidden, weight, targets, upstream, of_entropy):
    """Logprobs, entropy, and the gradients of both inputs, in float64 with the whole vocabulary."""
    h, w = (torch.from_numpy(each).double().requires_grad_() for each in (hidden, weight))
    table = (h @ w.t() / 0.7).log_softmax(-1)
    logprobs = table.gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)
    loss = (logprobs * torch.from_numpy(upstream)).sum()
    if of_entropy is not None:
        loss = loss + (entropy * torch.from_numpy(of_entropy)).sum()
    loss.backward()
    return logprobs.detach(), entropy.detach(), h.grad, w.grad


def drawn(width):
    """Hidden states, an output layer, targets, and gradients of logprobs and of entropy."""
    rng = np.random.default_rng(0)
    sizes = (10, width), (VOCAB, width), 10, 10
    hidden, weight, upstream, of_entropy = (rng.normal(size=n).astype(np.float32) for n in sizes)
    return hidden, weight, rng.integers(0, VOCAB, 10), upstream, of_entropy


@pytest.mark.parametrize("kept_gib", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_output_layer_in_chunks_over_split_vocabulary_equals_the_whole(
    pair, kept_gib, with_entropy
):
    *given, of_entropy = drawn(16)
    of_entropy = of_entropy if with_entropy else None
    *expected, of_weight = by_hand(*given, of_entropy)
    answers = pair.hidden_logprobs(
        **dict(zip(("hidden", "weight", "targets", "upstream"), given, strict=True)),
        kept_gib=kept_gib, entropy_upstream=of_entropy,
    )  # fmt: skip
    for *found, _ in answers:
        assert_close(found, expected)
    assert_close(np.concatenate([grad for *_, grad in answers]), of_weight)


@pytest.mark.parametrize("size", [1, 2])
def test_split_vocabulary_gives_the_whole_ones_logprobs_and_gradient(ranks, size):
    _, _, targets, upstream, _ = drawn(VOCAB)
    logits = 5 * drawn(VOCAB)[0]
    logits[3] += 200  # overflows without the maximum taken out
    weight = np.eye(VOCAB, dtype=np.float32)
    *expected, _ = by_hand(logits, weight, targets, upstream, None)
    for *found, _ in ranks[size].hidden_logprobs(
        hidden=logits, weight=weight, targets=targets, upstream=upstream
    ):
        assert_close(found, expected, atol=1e-4, rtol=1e-5)
