"""Operations of a training step, for the utilisation of the hardware (MFU)."""

from collections.abc import Iterable

from relax_hpc.models.architecture import Architecture, Audio, Vision
from relax_hpc.models.audio.windows import CHUNK, CHUNK_TOKENS, tokens_of

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


def active_channels(shape: Architecture) -> float:
    """Feed-forward channels that a token passes through in a layer, the mean over the layers."""
    if shape.experts is None:
        return shape.ffn_hidden_size
    chosen = shape.experts.experts_per_token * shape.experts.ffn_hidden_size
    share = len(shape.experts.layers) / shape.num_layers
    return share * chosen + (1 - share) * shape.ffn_hidden_size


def training_flops(
    shape: Architecture, lengths: Iterable[int], *, weights_learn: bool = True
) -> float:
    """Returns the FLOPs of one forward and backward over documents of these lengths.

    6 N T for T tokens and N weights in matrix products (the output layer's, not the embedding's; of
    experts those that a token is sent to), and 3 x 2 x layers x heads x head_dim x length^2 per
    document: causal attention is half of a square, forward 2 products, backward twice that. Nothing
    that is recomputed counts.

    Args:
        shape: of the model.
        lengths: of the documents.
        weights_learn: else their gradient is not computed, which is a third of 6 N T; what little
            adapters add does not count.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * active_channels(shape))
    weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    tokens = square = 0
    for length in lengths:
        tokens, square = tokens + length, square + length * length
    passes = 6.0 if weights_learn else 4.0
    return passes * weights * tokens + 6.0 * shape.num_layers * queries * square


def tower_flops(shape: Vision, grids: Iterable[tuple[int, int, int]]) -> float:
    """Returns the FLOPs of one forward and backward of the tower over media of these grids.

    6 N P for P patches and N weights in matrix products, of mergers for every token; 3 x 4 x layers
    x channels x patches^2 per frame, all of whose patches see each other. That features are
    computed once more for the gradient does not count.
    """
    hidden, area = shape.hidden_size, shape.merge**2
    merged = hidden * area
    block = 4 * hidden * hidden + 2 * hidden * shape.ffn_hidden_size
    merger = shape.levels * merged * (merged + shape.out_size)
    weights = shape.num_layers * block + shape.patch_values * hidden + merger / area
    patches = square = 0
    for time, height, width in grids:
        frame = height * width
        patches, square = patches + time * frame, square + time * frame * frame
    return 6.0 * weights * patches + 12.0 * shape.num_layers * hidden * square


def hearing_flops(shape: Audio, tokens: Iterable[int]) -> float:
    """Returns the FLOPs of one forward and backward of the tower over sounds of so many tokens.

    6 N T for T tokens and N weights in matrix products, of convolutions for every place that they
    are at; 3 x 4 x layers x channels x tokens^2 per window. What fills up a chunk does not count.
    """
    hidden, channels = shape.hidden_size, shape.channels
    layer = 4 * hidden * hidden + 2 * hidden * shape.ffn_hidden_size
    weights = shape.num_layers * layer + channels * tokens_of(shape.bins) * hidden
    weights += hidden * (hidden + shape.out_size)
    convolved, bins, frames = 0, shape.bins, CHUNK
    for entering in (1, channels, channels):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        convolved += 9 * entering * channels * bins * frames
    window, total, square = shape.chunks * CHUNK_TOKENS, 0, 0
    for count in tokens:
        whole, rest = divmod(count, window)
        total, square = total + count, square + whole * window**2 + rest**2
    products = (weights + convolved / CHUNK_TOKENS) * total
    return 6.0 * products + 12.0 * shape.num_layers * hidden * square
