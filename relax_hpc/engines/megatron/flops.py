"""Operations of a training step, for the utilisation of the hardware (MFU)."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

PEAK = 989e12
"""Dense bf16 operations per second of an H100 or H200, by its datasheet."""

_PEAKS = {
    "A100": 312e12, "A800": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": PEAK,
    "H800": PEAK, "H200": PEAK, "GH200": PEAK, "H20": 148e12, "B200": 2250e12, "GB200": 2500e12,
    "L40S": 362e12, "L40": 181e12,
}  # fmt: skip
"""The same of others, by a part of their names; the longest part that fits counts."""


def peak_of(device_name: str) -> float | None:
    """Dense bf16 operations per second of a GPU; None of one that is not known here."""
    words = device_name.split()
    fitting = [name for name in _PEAKS if _contains(words, name.split())]
    return _PEAKS[max(fitting, key=len)] if fitting else None


def _contains(words: list[str], name: list[str]) -> bool:
    """Whether all parts of `name` are among `words`, as "A100" is "A100-SXM4-80GB"."""
    return all(any(part == word.split("-")[0] for word in words) for part in name)


class Sizes(NamedTuple):
    """A `Shape`."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


class Shape(Protocol):
    """A dense model; `model.Architecture` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> float:
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
