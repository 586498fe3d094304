"""Places the compiled kernels of libraries in a private folder per set of versions."""

import platform
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.runtime.files import permissions, scratch

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
"""Other variables with the same meaning."""
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "sglang": ("sglang",),
    "kernel": ("sglang-kernel", "sgl-kernel"),
    "flashinfer": ("flashinfer-python",),
    "tvm-ffi": ("apache-tvm-ffi",),
}
"""Packages whose versions determine compiled kernels: short name -> its names, newest first."""
_REMEDY = "choose a folder of your own"


def folder_of(root: Path) -> Path:
    """Returns the folder for the installed versions."""
    parts = [f"python{platform.python_version()}", platform.machine()]
    for name, packages in PACKAGES.items():
        if found := _version_of(packages):
            parts.append(f"{name}{found}")
    return root / "-".join(parts)


def keep(environment: MutableMapping[str, str], root: Path | None) -> None:
    """Points this process and its children to the kernel folder of their versions.

    Call before the libraries that read these variables are imported.

    Args:
        environment: of this process. A variable that the user has set stays.
        root: `launch.advanced.kernel_cache`; None changes nothing.

    Raises:
        ConfigError: the folder cannot be made, or others may have written in it.
    """
    if root is None:
        return
    folder = folder_of(root)
    try:
        with permissions.set_umask(0o077):  # a mode counts for the last of the folders alone
            root.mkdir(parents=True, exist_ok=True)
            check(root)  # before anything is made in it
            folder.mkdir(exist_ok=True)
            parts = {name: folder / part for name, part in VARIABLES.items()}
            for part in parts.values():
                part.mkdir(parents=True, exist_ok=True)
            check(root, folder, *parts.values())
        for name, part in parts.items():
            if not _is_said(environment, name):
                environment[name] = str(part)
    except OSError as error:
        raise _unfit(root, error) from None


def check(root: Path, *parts: Path) -> None:
    """Refuses a folder that somebody else could write to or replace, now or later: libraries find
    it by its path.

    Raises:
        ConfigError: names its owner, and what to do.
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
    check_above(root)


def check_above(root: Path) -> None:
    """Refuses a folder, existing or not, that somebody else could replace.

    Raises:
        ConfigError: names the cause, and what to do.
    """
    for where, doubt in permissions.replaceable(root).items():
        raise ConfigError(
            f"{_key(root)}: {where} {doubt.why}: others may put kernels of theirs in the place of "
            f"yours; {doubt.remedy}"
        )


def _unfit(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{_key(root)}: {error.filename}: {error.strerror}; {_REMEDY}")


def _key(root: Path) -> str:
    return f"launch.advanced.kernel_cache = {str(root)!r}"


def _is_said(environment: Mapping[str, str], name: str) -> bool:
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
