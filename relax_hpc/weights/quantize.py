"""Quantises weights to FP8, with a scale per block of 128 x 128, before they are sent.

A weight w of [n, k] becomes q of [n, k] in float8_e4m3fn and `scale_inv` of [n / 128, k / 128],
rounded up, in float32, so that w is about q times its block's scale_inv. Names and layout are those
of DeepSeek-V3's checkpoints, which SGLang loads as they are.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from relax_hpc.config.rollout import FP8_BLOCK, TOWERS, WeightsConfig
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, views
from relax_hpc.weights.staging import Gather

_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LINEAR, _SCALE = "_proj.weight", "_scale_inv"
_CHUNK = 1 << 26
"""Elements converted to float32 at a time."""


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n, k] of any type -> ([..., n, k] float8_e4m3fn, [..., n / 128, k / 128] float32).

    A block's scale is its largest magnitude over 448, the largest number of the type; 1 if the
    block is all zero. The error of an element is at most 1/16 of it, or scale / 1024 if that is
    more (half of the type's smallest step). A value that is not finite makes its block NaN.
    """
    *batch, n, k = weights.shape
    rows, columns = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
    if n % FP8_BLOCK or k % FP8_BLOCK:
        padding = (0, columns * FP8_BLOCK - k, 0, rows * FP8_BLOCK - n)
        weights = torch.nn.functional.pad(weights, padding)
    # Memory makes the pace: each pass reads what is as small as it can be.
    blocks = weights.reshape(*batch, rows, FP8_BLOCK, columns, FP8_BLOCK)
    largest = torch.linalg.vector_norm(blocks, torch.inf, (-3, -1)).float()
    scales = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp(min=_SMALLEST_SCALE))
    # The largest quotient may be 448 and a bit, by rounding, and becomes 448 again.
    scaled = blocks / scales[..., :, None, :, None]
    flat = scaled.view(*batch, rows * FP8_BLOCK, columns * FP8_BLOCK)
    return flat[..., :n, :k].to(torch.float8_e4m3fn), scales


class Quantizer:
    """Quantises a model's weights: single tensors, a stream, or buckets."""

    def __init__(self, config: WeightsConfig) -> None:
        self._kept = [*config.advanced.modules_to_not_convert, *TOWERS]
        self.config_json = config.quantization_config

    @classmethod
    def of(cls, config: WeightsConfig) -> Self | None:
        """Returns None if weights are sent as they are."""
        return None if config.quantize == "none" else cls(config)

    def applies_to(self, spec: Spec) -> bool:
        """Whether it is a weight of a linear layer; embeddings, output matrix, norms, routers and
        encoders are not."""
        module = spec.name.removesuffix(".weight")
        kept = any(f".{name.strip('.')}." in f".{module}." for name in self._kept)
        return spec.name.endswith(_LINEAR) and len(spec.shape) == 2 and not kept

    def specs(self, specs: Iterable[Spec]) -> list[Spec]:
        return [made for spec in specs for made in self._list_made(spec)]

    @torch.no_grad()
    def tensors(
        self, stream: Iterator[tuple[str, Tensor]], only: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the stream, each quantised weight before its scale.

        Args:
            stream: drained.
            only: names to keep in the result; tensors not needed for them are left out.
        """
        for name, tensor in stream:
            if name not in only and name + _SCALE not in only:
                continue
            if not self.applies_to(Spec(name, tensor.dtype, tuple(tensor.shape))):
                yield name, tensor
                continue
            quantized, scales = quantize(tensor)
            yield name, quantized
            yield name + _SCALE, scales

    def plan(self, plan: BucketPlan) -> BucketPlan:
        """Returns the quantised buckets; the widest types come first, for alignment."""
        buckets = [self.specs(bucket) for bucket in plan.buckets]
        return BucketPlan(
            tuple(
                tuple(sorted(bucket, key=lambda spec: -spec.dtype.itemsize)) for bucket in buckets
            )
        )

    @torch.no_grad()
    def fill(
        self, flat: Tensor, bucket: Sequence[Spec], source: Tensor, source_bucket: Sequence[Spec]
    ) -> None:
        """Fills `flat`, the bytes of a bucket of `plan`, from its source bucket."""
        places = {s.name: v for s, v in zip(bucket, views(flat, bucket), strict=True)}
        kept, by_shape = list[Spec](), dict[tuple[int, ...], list[Spec]]()
        given = {}
        for spec, tensor in zip(source_bucket, views(source, source_bucket), strict=True):
            given[spec.name] = tensor
            (by_shape.setdefault(spec.shape, []) if self.applies_to(spec) else kept).append(spec)
        _copy([places[s.name] for s in kept], [given[s.name] for s in kept])
        for shape, specs in by_shape.items():  # many experts in a few kernels
            size = max(1, _CHUNK // torch.Size(shape).numel())
            for first in range(0, len(specs), size):
                some = specs[first : first + size]
                quantized, scales = quantize(torch.stack([given[spec.name] for spec in some]))
                bits = [places[spec.name].view(torch.uint8) for spec in some]
                _copy(bits, list(quantized.view(torch.uint8)))
                _copy([places[spec.name + _SCALE] for spec in some], list(scales))

    def _list_made(self, spec: Spec) -> list[Spec]:
        if not self.applies_to(spec):
            return [spec]
        scales = tuple(-(-size // FP8_BLOCK) for size in spec.shape)
        return [
            spec._replace(dtype=torch.float8_e4m3fn),
            spec._replace(name=spec.name + _SCALE, dtype=torch.float32, shape=scales),
        ]


class QuantizedGather:
    """Gathers weights and quantises them where they arrive."""

    def __init__(self, gather: Gather, plan: BucketPlan, quantizer: Quantizer) -> None:
        """Made by the ranks that fill buckets; the others give to `gather` as before.

        Args:
            plan: of weights as the trainer has them.
        """
        self._gather, self._source, self._quantizer = gather, plan, quantizer
        self._plan = quantizer.plan(plan)
        self._scratch: Tensor | None = None

    def begin(self) -> None:
        self._gather.begin()

    def give(self, skipped: Collection[int] = ()) -> None:
        self._gather.give(skipped)

    def fill(self, index: int, flat: Tensor) -> None:
        if self._scratch is None:
            size = max(self._source.sizes)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=flat.device)
        source = self._scratch[: self._source.sizes[index]]
        self._gather.fill(index, source)
        buckets = self._plan.buckets[index], self._source.buckets[index]
        self._quantizer.fill(flat, buckets[0], source, buckets[1])


def gather(
    config: WeightsConfig, specs: Iterable[Spec], gather: Gather
) -> tuple[BucketPlan, Gather]:
    """Returns the buckets for engines and the gather that fills them, quantised if configured.

    Args:
        config: whether to quantise, and the size of buckets.
        specs: of the weights as the trainer has them, in the order of the model.
        gather: of buckets of at most `config.advanced.bucket_bytes`; this rank's end of it.
    """
    plan = BucketPlan.of(specs, config.advanced.bucket_bytes)
    quantizer = Quantizer.of(config)
    if quantizer is None:
        return plan, gather
    return quantizer.plan(plan), QuantizedGather(gather, plan, quantizer)


def _copy(places: list[Tensor], values: list[Tensor]) -> None:
    if places:
        torch._foreach_copy_(places, values)
