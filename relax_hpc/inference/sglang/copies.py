"""Finds where an engine puts weights: records the copies of its own loader once, then repeats them.

A model's `load_weights` looks up every tensor by name, in Python, which takes longer than the
transfer. If weights are stored as they come, it only copies slices in the end. We record these
copies without making them, then make them for every update in a few kernels.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from relax_hpc.runtime.comm.bucket import Spec, views

Kwargs = dict[str, Any] | None
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class Copies:
    """The copies that loading a bucket consists of."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.targets, self.sources = targets, sources
        pairs = list(zip(map(_as_is, targets), map(_as_is, sources), strict=True))
        self._quick = [pair for pair in pairs if all(map(_is_plain, pair))]
        self._slow = [pair for pair in pairs if not all(map(_is_plain, pair))]

    @torch.no_grad()
    def make(self) -> None:
        if self._quick:
            targets, sources = zip(*self._quick, strict=True)
            torch._foreach_copy_(targets, sources)
        for target, source in self._slow:
            target.copy_(source)

    def differing(self) -> int:
        """Returns the number of targets whose bits differ from their source."""
        pairs = zip(map(_bits, self.targets), map(_bits, self.sources), strict=True)
        return sum(not torch.equal(target, source) for target, source in pairs)


class NotPureError(Exception):
    """The loader does more than copy."""


class MisfitError(ValueError):
    """The model has no place for a tensor."""


def load(load_weights: LoadWeights, flat: Tensor, bucket: Sequence[Spec]) -> None:
    """Loads a bucket with bytes `flat` into the model.

    Raises:
        MisfitError: names the tensor at which its loader fails.
        NotPureError: while recording.
    """
    given = list[Spec]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for spec, tensor in zip(bucket, views(flat, bucket), strict=True):
            given.append(spec)
            yield spec.name, tensor

    try:
        load_weights(tensors())
    except (RuntimeError, AssertionError, ValueError, LookupError, TypeError) as error:
        spec = given[-1]
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise MisfitError(f"{spec.name} {list(spec.shape)} does not fit ({said})") from error


def record(load_weights: LoadWeights, flat: Tensor, bucket: Sequence[Spec]) -> Copies:
    """Returns the copies that `load_weights` would make of a bucket with bytes `flat`.

    Changes nothing.

    Raises:
        NotPureError: it computes with the tensors.
        MisfitError: it fails.
    """
    with torch.no_grad(), _Watch(flat) as watch:
        load(load_weights, flat, bucket)
    return Copies(watch.targets, watch.sources)


def find_uncovered(model: nn.Module, targets: Iterable[Tensor]) -> list[str]:
    """Returns the parameters with elements that no copy targets."""
    written: dict[int, int] = {}
    for target in targets:
        storage = target.untyped_storage().data_ptr()
        written[storage] = written.get(storage, 0) + target.numel()
    return [
        name
        for name, parameter in model.named_parameters()
        if written.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel()
    ]


def find_left_over(copies: Copies, flat: Tensor, bucket: Iterable[Spec]) -> list[str]:
    """Returns the tensors of a bucket with bytes `flat` of which nothing is copied."""
    used = sorted(source.data_ptr() - flat.data_ptr() for source in copies.sources)
    found, start = [], 0
    for spec in bucket:
        end = start + spec.nbytes
        if bisect_left(used, start) == bisect_left(used, end):
            found.append(spec.name)
        start = end
    return found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from a buffer instead of making them; any other operation on it is an
    error."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = flat.data_ptr()
        self._end = self._first + flat.nbytes
        self.targets, self.sources = list[Tensor](), list[Tensor]()

    def __torch_dispatch__(
        self, func: OpOverload, _: object, args: tuple[Any, ...] = (), kwargs: Kwargs = None
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and self._is_ours(args[1]):
            target, source = args[0], args[1]
            if target.dtype != source.dtype or target.shape != source.shape:
                raise NotPureError(f"{source.dtype} {source.shape} becomes {target.dtype}")
            self.targets.append(target)
            self.sources.append(source)
            return target
        ours = any(self._is_ours(arg) for arg in args)
        if ours and func._schema.is_mutable:
            raise NotPureError(f"it does {func} to them")
        result = func(*args, **kwargs)
        if ours and not self._is_ours(result):
            raise NotPureError(f"it does {func} with them")
        return result

    def _is_ours(self, value: object) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type != "meta"
            and self._first <= value.data_ptr() < self._end
        )


def _as_is(tensor: Tensor) -> Tensor:
    """Returns a view for multi-tensor copy kernels, which do not support 8-bit dtypes."""
    return _bits(tensor) if tensor.dtype.itemsize == 1 else tensor


def scales_are_converted(model: nn.Module) -> bool:
    """Whether SGLang converted FP8 scales for DeepGEMM on Blackwell at its start; its kernels would
    not understand scales that are copied there."""
    return any(getattr(parameter, "format_ue8m0", False) for parameter in model.parameters())


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _bits(tensor: Tensor) -> Tensor:
    """Returns the elements as integers, so that NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize])
