"""Measures the costs of a step: seconds, memory, utilisation of the hardware (MFU)."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from relax_hpc.data.media.kinds import Modality, modality_of
from relax_hpc.trainer.megatron.packing import FeatureSpan, MicroBatchWork
from relax_hpc.trainer.models.architecture import (
    CHUNK,
    CHUNK_TOKENS,
    Architecture,
    AudioArchitecture,
    VisionArchitecture,
    tokens_of,
)

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200, by its datasheet."""

_PEAKS = {
    "A100": 312e12, "A800": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": PEAK,
    "H800": PEAK, "H200": PEAK, "GH200": PEAK, "H20": 148e12, "B200": 2250e12, "GB200": 2500e12,
    "L40S": 362e12, "L40": 181e12,
}  # fmt: skip
"""The same for other GPUs, by a part of their names; the longest match counts."""


def peak_of(device_name: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a GPU; None if unknown."""
    words = device_name.split()
    fitting = [name for name in _PEAKS if _contains(words, name.split())]
    return _PEAKS[max(fitting, key=len)] if fitting else None


def _contains(words: list[str], name: list[str]) -> bool:
    """Whether all parts of `name` are among `words`, as "A100" is in "A100-SXM4-80GB"."""
    return all(any(part == word.split("-")[0] for word in words) for part in name)


def active_channels(shape: Architecture) -> float:
    """Returns the feed-forward channels per token and layer, averaged over the layers."""
    if shape.experts is None:
        return shape.ffn_hidden_size
    chosen = shape.experts.experts_per_token * shape.experts.ffn_hidden_size
    share = len(shape.experts.layers) / shape.num_layers
    return share * chosen + (1 - share) * shape.ffn_hidden_size


def training_flops(
    shape: Architecture, lengths: Iterable[int], *, weights_learn: bool = True
) -> float:
    """Returns the FLOPs of one forward and backward over documents of these lengths.

    6 N T for T tokens and N weights in matrix products (with the output layer but not the
    embedding, and only the active experts), and 3 x 2 x layers x heads x head_dim x length^2 per
    document: causal attention is half of a square, forward 2 products, backward twice that.
    Recomputation does not count.

    Args:
        weights_learn: else their gradient is not computed, which is a third of 6 N T; the small
            cost of adapters does not count.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * active_channels(shape))
    weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    tokens = square = 0
    for length in lengths:
        tokens, square = tokens + length, square + length * length
    passes = 6.0 if weights_learn else 4.0
    return passes * weights * tokens + 6.0 * shape.num_layers * queries * square


def tower_flops(shape: VisionArchitecture, grids: Iterable[tuple[int, int, int]]) -> float:
    """Returns the FLOPs of one forward and backward of the vision encoder over media of these
    grids.

    6 N P for P patches and N weights in matrix products, with mergers per token; 3 x 4 x layers x
    channels x patches^2 per frame, for full attention. The second forward for the gradient does not
    count.
    """
    hidden, area = shape.hidden_size, shape.merge**2
    merged = hidden * area
    block = 4 * hidden * hidden + 2 * hidden * shape.ffn_hidden_size
    merger = shape.levels * merged * (merged + shape.out_size)
    weights = shape.num_layers * block + shape.patch_values * hidden + merger / area
    patches = square = 0
    for frames, height, width in grids:
        frame = height * width
        patches, square = patches + frames * frame, square + frames * frame * frame
    return 6.0 * weights * patches + 12.0 * shape.num_layers * hidden * square


def hearing_flops(shape: AudioArchitecture, tokens: Iterable[int]) -> float:
    """Returns the FLOPs of one forward and backward of the audio encoder over sounds of these
    tokens.

    6 N T for T tokens and N weights in matrix products, with convolutions per position; 3 x 4 x
    layers x channels x tokens^2 per window. Padding of chunks does not count.
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


_Mark = float | torch.cuda.Event
_MEDIA = tuple(
    f"train/media/{kind}{what}" for kind in get_args(Modality) for what in ("s", "_tokens")
)
"""Media encoded per modality, and tokens that stood for their features."""


class Costs:
    """Collects during a step; waits for the GPU and the other ranks only at its end."""

    def __init__(
        self, shape: Architecture, device: torch.device, *, weights_learn: bool = True
    ) -> None:
        self._shape, self._device, self._weights_learn = shape, device, weights_learn
        on_gpu = device.type == "cuda"
        self._peak = peak_of(torch.cuda.get_device_name(device)) if on_gpu else None
        self._begin()

    def _begin(self) -> None:
        self._phases: dict[str, list[tuple[_Mark, _Mark]]] = {}
        self._tokens = self._padded = 0
        self._flops = self._tower_flops = 0.0
        self._media = Counter[str]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's time to `time/name`, on the GPU if there is one."""
        begin = self._mark()
        yield
        self._phases.setdefault(name, []).append((begin, self._mark()))

    def count(self, works: Sequence[MicroBatchWork], *, is_forward: bool = False) -> None:
        """Counts a forward and backward pass; all ranks of a replica count it.

        Args:
            is_forward: whether it was a forward pass alone, with training to follow.
        """
        for work in works:
            lengths = work.micro_batch.lengths[: len(work.samples)]
            if is_forward:
                self._flops += training_flops(self._shape, lengths) / 3
                continue
            flops = training_flops(self._shape, lengths, weights_learn=self._weights_learn)
            self._tokens += sum(lengths)
            self._padded += sum(work.micro_batch.lengths) - sum(lengths)
            self._flops += flops
        if self._shape.vision is not None:
            feature_spans = [each for work in works for each in work.micro_batch.feature_spans]
            flops = self._of_towers(feature_spans) / (3 if is_forward else 1)
            self._tower_flops += flops
            self._flops += flops
            if not is_forward:
                self._count_media(feature_spans)

    def _count_media(self, every: Sequence[FeatureSpan]) -> None:
        kinds = {each.key: modality_of(each.row.media[each.medium]) for each in every}
        self._media.update(f"train/media/{kind}s" for kind in kinds.values())
        for each in every:
            self._media[f"train/media/{kinds[each.key]}_tokens"] += each.tokens

    def _of_towers(self, every: Sequence[FeatureSpan]) -> float:
        seen = {s.key: s.row.media[s.medium].grid_thw for s in every if not s.is_heard}
        heard = {s.key: s.features for s in every if s.is_heard}
        shape = self._shape
        flops = tower_flops(shape.vision, seen.values()) if shape.vision else 0.0
        return flops + (hearing_flops(shape.audio, heard.values()) if shape.audio else 0.0)

    def end_step(self) -> dict[str, float]:
        """Returns the costs of the step; collective over all ranks.

        Returns:
            `time/...` of every phase [s], this rank's own: waits for other ranks count in the phase
            in which they occur, so that phases add up. Over all ranks: `train/tokens_per_s_per_gpu`
            and, on a GPU of known peak, `train/mfu`, by the seconds in these phases; for vision
            models `train/tower_tflops`, of all replicas, and `train/media/...`: media encoded (each
            counted once per replica and portion), and tokens that stood for features, by modality;
            `train/padding`, the share of padding among computed tokens; on GPUs `memory/peak_gib`,
            of the fullest, since start.
        """
        on_gpu = self._device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if on_gpu else 0.0
        if on_gpu:
            torch.cuda.synchronize(self._device)
        found = {
            f"time/{name}": sum(_between(*pair) for pair in pairs)
            for name, pairs in sorted(self._phases.items())
        }
        [fullest] = self._reduce([memory], dist.ReduceOp.MAX)
        sums = [self._tokens, self._padded, self._flops, self._tower_flops, sum(found.values())]
        tokens, padded, flops, of_towers, seconds, *media = self._reduce(
            [*sums, *(float(self._media[name]) for name in _MEDIA)], dist.ReduceOp.SUM
        )
        self._begin()
        ranks = dist.get_world_size()
        replica = ranks / mpu.get_data_parallel_world_size()  # as many ranks counted the same
        seconds = max(seconds, 1e-9)
        found["train/tokens_per_s_per_gpu"] = tokens / replica / seconds
        found["train/padding"] = padded / max(tokens + padded, 1)
        if self._shape.vision is not None:
            found["train/tower_tflops"] = of_towers / replica / 1e12
            found |= {n: count / replica for n, count in zip(_MEDIA, media, strict=True) if count}
        if self._peak:
            found["train/mfu"] = flops / replica / seconds / self._peak
        return found | ({"memory/peak_gib": fullest} if on_gpu else {})

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _reduce(self, values: Sequence[float], kind: dist.ReduceOp.RedOpType) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, kind)
        return [float(value) for value in numbers.tolist()]


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end)) / 1000
