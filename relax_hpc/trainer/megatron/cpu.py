"""Lets stock Megatron-core run on a torch without CUDA. Inert if CUDA is available.

Megatron-core names `torch.cuda.*` and the device "cuda" literally. Every `megatron.core` module
gets a proxy of the *name* `torch`, whose factories map cuda to cpu and whose `.cuda` is a stub.
Torch itself is patched in two places only, `Tensor.cuda` and `Tensor.type`.
"""

import contextlib
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "eye",
    "as_tensor", "empty_strided", "zeros_like", "ones_like", "empty_like", "full_like",
    "linspace", "scalar_tensor",
)  # fmt: skip


def install() -> None:
    """Patches the loaded `megatron.core` modules, and those imported later. Idempotent.

    Called before their first import, it also saves the import of torch's compiler and of wandb,
    which Megatron-core would not use here: a second or two.
    """
    if torch.cuda.is_available() or any(isinstance(x, _PatchOnImport) for x in sys.meta_path):
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists under TP
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _type_as_megatron_spells_it(torch.Tensor.type)  # type: ignore[method-assign]
    proxy = _TorchProxy()
    sys.meta_path.insert(0, _PatchOnImport(proxy))
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            _patch(module, proxy)
    with _absent("wandb"):
        from megatron.core.tensor_parallel import random
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


@contextlib.contextmanager
def _absent(package: str) -> Iterator[None]:
    is_hidden = package not in sys.modules
    if is_hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[package]


def _patch(module: types.ModuleType, proxy: "_TorchProxy") -> None:
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()
    if vars(module).get("torch") is torch:
        vars(module)["torch"] = proxy


def _type_as_megatron_spells_it(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes type strings like "torch.cuda.FloatTensor", by which the optimizers tell parameters
    apart."""

    def type_(
        self: torch.Tensor,
        dtype: object = None,
        non_blocking: bool = False,
        **kwargs: object,
    ) -> object:
        if dtype is not None:
            return original(self, dtype, non_blocking, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        name = original(self)
        if caller.startswith("megatron.core.") and self.device.type == "cpu":
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> object:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)  # device=0


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Event") -> float:
        return 0.0


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Cuda(types.ModuleType):
    """Replaces `torch.cuda`; names without a stub are the real ones."""

    def __init__(self) -> None:
        super().__init__("torch.cuda[cpu]")
        stream = _Stream()
        ignore = lambda *_, **__: None  # noqa: E731
        stubs: dict[str, object] = {
            "Stream": _Stream,
            "Event": _Event,
            "current_device": lambda: _CPU,
            "device_count": lambda: 0,
            "is_available": lambda: False,
            "current_stream": lambda *_, **__: stream,
            "default_stream": lambda *_, **__: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": ignore,
            "empty_cache": ignore,
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
            "nvtx": types.SimpleNamespace(
                range=lambda *_, **__: contextlib.nullcontext(),
                range_push=ignore,
                range_pop=ignore,
            ),
        }
        vars(self).update(stubs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch.cuda, name)


class _TorchProxy(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("torch[cpu]")
        vars(self).update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
        vars(self)["cuda"] = _Cuda()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch, name)


class _PatchOnImport:
    """A meta path finder: imports as usual, then patches."""

    def __init__(self, proxy: _TorchProxy) -> None:
        self._proxy = proxy

    def find_spec(
        self, name: str, path: Any = None, target: types.ModuleType | None = None  # noqa: ANN401
    ) -> ModuleSpec | None:  # fmt: skip
        if not name.startswith("megatron.core"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _patch(module, self._proxy)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
