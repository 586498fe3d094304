"""Operations of a training step, for the utilisation of the hardware (MFU)."""

from collections.abc import Iterable
from typing import Protocol

PEAK = 989e12
"""Dense bf16 operations per second of an H100 or H200, by its datasheet."""


class Shape(Protocol):
    """A dense model; `model.Architecture` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int:
        """Of a mixture of experts: what one token passes through, all its experts together."""
        ...

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def training_flops(shape: Shape, lengths: Iterable[int]) -> float:
    """Of one forward and backward over documents of these lengths, nothing recomputed.

    6 N T for T tokens and N weights in matrix products (the output layer's, not the embedding's),
    and 3 x 2 x layers x heads x head_dim x length^2 per document: causal attention is half of a
    square, forward 2 products, backward twice that (its own recomputation does not count).
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.ffn_hidden_size)
    weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    tokens = square = 0
    for length in lengths:
        tokens, square = tokens + length, square + length * length
    return 6.0 * weights * tokens + 6.0 * shape.num_layers * queries * square
