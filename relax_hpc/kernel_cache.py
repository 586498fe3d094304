"""Folders in which libraries keep the kernels that they compile: one per set of versions, in a
place of the user's choice, and nobody else's to write."""

import platform
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_hpc import permissions, scratch
from relax_hpc.errors import ConfigError, LaunchError

VARIABLES = {
    scratch.COMPILED: "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",  # SGLang hands it on to DeepGEMM as DG_JIT_CACHE_DIR
}
"""Variable that a library reads -> its part of the folder."""
_ALSO = {"TRITON_CACHE_DIR": "TRITON_HOME"}
"""Other variables that say the same."""
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "sglang": ("sglang",),
    "kernel": ("sglang-kernel", "sgl-kernel"),
    "flashinfer": ("flashinfer-python",),
    "tvm-ffi": ("apache-tvm-ffi",),
}
"""Packages on whose versions compiled kernels depend: short name -> its names, newest first."""
_REMEDY = "choose a folder of your own"


def folder_of(root: Path) -> Path:
    """Returns the folder of the versions that are installed here."""
    parts = [f"python{platform.python_version()}", platform.machine()]
    for name, packages in PACKAGES.items():
        if found := _version_of(packages):
            parts.append(f"{name}{found}")
    return root / "-".join(parts)


def keep(environment: MutableMapping[str, str], root: Path | None) -> None:
    """Has this process, and those that it starts, keep kernels in the folder of their versions.

    Must be called before the libraries are imported that read where that is.

    Args:
        environment: of this process. A variable that the user has set stays.
        root: `launch.kernel_cache`; unset leaves everything as it is.

    Raises:
        ConfigError: the folder cannot be made, or others may have put there what would be run.
    """
    if root is None:
        return
    folder = folder_of(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check(root)  # before anything is made in it
        folder.mkdir(mode=0o700, exist_ok=True)
        check(root, folder)
        for name, part in VARIABLES.items():
            if not _is_said(environment, name):
                (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
                environment[name] = str(folder / part)
    except OSError as error:
        raise _unfit(root, error) from None


def check(root: Path, *parts: Path) -> None:
    """Refuses a folder in which somebody else may have put what would be run.

    Raises:
        ConfigError: names whose it is, and what to do.
    """
    try:
        permissions.check_own(root, *parts, remedy=_REMEDY)
    except LaunchError as error:
        raise ConfigError(f"{_key(root)}: {error}") from None
    except OSError as error:
        raise _unfit(root, error) from None
    for path in (root, *parts):
        if not path.is_dir():
            raise ConfigError(f"{_key(root)}: {path} is not a folder; {_REMEDY}")


def _unfit(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{_key(root)}: {error.filename}: {error.strerror}; {_REMEDY}")


def _key(root: Path) -> str:
    return f"launch.kernel_cache = {str(root)!r}"


def _is_said(environment: Mapping[str, str], name: str) -> bool:
    """Whether the user has said where a library keeps its kernels."""
    if name == scratch.COMPILED:
        return scratch.is_said(environment)
    return any(environment.get(each) for each in (name, _ALSO.get(name, name)))


def _version_of(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
