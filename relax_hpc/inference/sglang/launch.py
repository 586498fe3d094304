"""Builds the command line of a stock SGLang server, on GPU or CPU; holds workers, reads its log."""

import argparse
import difflib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from relax_hpc.data.media.recipe import is_shown_media
from relax_hpc.errors import ConfigError
from relax_hpc.inference.spec import ALONE, EngineSpec, NodeShare
from relax_hpc.runtime.comm.orders import LOADER
from relax_hpc.sections import PassThrough

ENVIRONMENT: dict[str, dict[str, str]] = {
    # /health then says that the server lives; by default it samples a token, and a paused server
    # could not.
    "cuda": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    "cpu": {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_USE_CPU_ENGINE": "1",
    },
}

GATE = "--gate"
"""Our own argument: a file whose existence lets the server take its GPUs."""
_POLL_S = 0.05
_PROCESSORS = "relax_hpc.inference.sglang.processors"
_MODELS = "relax_hpc.inference.sglang.models"

_OURS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "seed",
    "max_running_requests": "{pool}.max_running_requests",
    "enable_return_routed_experts": "rollout.advanced.routed_experts",
    "nnodes": "{pool}.nodes_per_engine",
    "node_rank": None,
    "dist_init_addr": None,
    "host": None,
    "port": None,
    "api_key": None,
    "config": None,
    "weight_version": None,
    "custom_weight_loader": None,
}
"""Arguments that the run sets, and the key of the job that decides each."""

_ALIASES = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "pp": "pp_size",
    "nccl_init_addr": "dist_init_addr",
}
"""Other names that SGLang accepts for arguments that matter here."""

_ASKED_OFTEN = ["/model_info", "/v1/loads", "/health"]
"""Frequent polls for versions and health, kept out of the log."""

_CPU_DEFAULTS: PassThrough = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    # The tokens bound the cache; the fraction is only held against what neighbours take meanwhile.
    "mem_fraction_static": 0.5,
    "max_total_tokens": 32768,
    "sleep_on_idle": True,  # else an engine with nothing to do takes a core
}


def environment(
    device: Literal["cpu", "cuda"], model_path: Path, *, is_quantized: bool
) -> dict[str, str]:
    """Returns the environment of the server; a vision model gets its media from our processor."""
    hooks = {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": _PROCESSORS,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": _MODELS,
        # Features of the longest videos fit: one that is prefilled in chunks is encoded once. By
        # default it is 100, and 0 for Qwen3-VL on large Hopper GPUs (0.5.23).
        "SGLANG_VLM_CACHE_SIZE_MB": "512",
    }
    # DeepGEMM's kernels are compiled as they are met, and kept in the user's home. By default all
    # of every length up to 16,384 come first: 10 to 20 minutes of a start.
    eight_bits = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false"}
    return (
        ENVIRONMENT[device]
        | (hooks if is_shown_media(model_path) else {})
        | (eight_bits if is_quantized else {})
    )


def arguments(
    spec: EngineSpec,
    *,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"],
    share: NodeShare = ALONE,
) -> list[str]:
    """Returns the arguments of `serve`, which are SGLang's, without the token (see
    `write_options`).

    Token ids go in and come out, so the server needs no tokenizer; versions count from 0.
    """
    settings: PassThrough = {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "incremental_streaming_output": True,  # else a chunk has everything so far, again and again
        "uvicorn_access_log_exclude_prefixes": _ASKED_OFTEN,
        **(_CPU_DEFAULTS if device == "cpu" else {}),
        **spec.args,
        "enable_return_routed_experts": spec.routed_experts,
        "custom_weight_loader": [LOADER],
        "model_path": str(spec.model_path),
        "host": host,
        "port": port,
        "dtype": spec.dtype,
        "random_seed": spec.seed,
        "weight_version": "0",
        "max_running_requests": spec.max_running_requests,
    }
    if spec.quantization is not None:
        # The folder's weights are plain: the trainer sends the first ones.
        settings["load_format"] = "dummy"
        settings["json_model_override_args"] = json.dumps(
            {"quantization_config": spec.quantization}
        )
    if share.nodes > 1:
        settings["nnodes"], settings["node_rank"] = share.nodes, share.rank
        settings["dist_init_addr"] = share.address
    return as_flags(settings)


class Size(NamedTuple):
    """The GPUs of an engine, by kind of parallelism."""

    tensor: int
    pipeline: int
    data: int
    attention_data: bool
    """Data-parallel attention: its ranks are those of tensor parallelism."""

    @property
    def gpus(self) -> int:
        replicas = 1 if self.attention_data else self.data
        return self.tensor * self.pipeline * replicas


def size_of(engine_args: PassThrough, pool: str = "engines.rollout") -> Size:
    """Reads the size from a pool's arguments, by any of SGLang's names."""
    named = {_ALIASES.get(key, key): value for key, value in engine_args.items()}

    def count(key: str) -> int:
        value = named.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{pool}.args.{key} = {value!r}: expected 1, 2, ...")
        return value

    attention = bool(named.get("enable_dp_attention", False))
    return Size(count("tp_size"), count("pp_size"), count("dp_size"), attention)


def write_options(path: Path, token: str) -> None:
    """Writes secrets to a file for `--config` (JSON is YAML), off the command line."""
    path.write_text(json.dumps({"api-key": token}), encoding="utf-8")


def read_token(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["api-key"])


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "disable_radix_cache": True}` -> `--tp-size 2 --disable-radix-cache`.

    False leaves a switch off; a list becomes several values.
    """
    flags: list[str] = []
    for key, value in settings.items():
        flag = _flag(key)
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def check(engine_args: PassThrough, pool: str = "engines.rollout") -> None:
    """Checks a pool's arguments with SGLang's own parser, if SGLang is installed here.

    Elsewhere (on a login node) the server's start is the check. Messages name the pool `pool`.

    Raises:
        ConfigError: unknown argument, value of the wrong type, or one that the run decides.
    """
    for key in engine_args:
        if (name := _ALIASES.get(key, key)) in _OURS:
            ours = _OURS[name]
            remedy = f"set {ours.format(pool=pool)}" if ours else "leave it out"
            raise ConfigError(f"{pool}.args.{key}: is set by the run; {remedy}")
    _check_size(size_of(engine_args, pool), pool)
    if importlib.util.find_spec("sglang") is None:
        return
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog=f"{pool}.args", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    for key, value in engine_args.items():
        if (flag := _flag(key)) not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            guess = f"; did you mean {close[0][2:].replace('-', '_')}?" if close else ""
            raise ConfigError(f"{pool}.args.{key}: SGLang has no {flag}{guess}")
        if value is False:
            _check_off(f"{pool}.args.{key}", key, known[flag])
    parser.parse_args(["--model-path", "model", *as_flags(engine_args)])


def _check_off(dotted: str, key: str, action: argparse.Action) -> None:
    """Checks that false turns a switch off: we can only leave it out."""
    if action.nargs == 0 and action.default is False:
        return
    opposite = f"--no-{_flag(key)[2:]}"
    if opposite in action.option_strings:
        remedy = f"set {opposite[2:].replace('-', '_')} = true"
    elif action.nargs == 0:
        remedy = "SGLang can only be told to turn it on; leave it out"
    else:
        remedy = "it takes a value"
    raise ConfigError(f"{dotted} = false: {remedy}")


def check_recompute(engine_args: PassThrough, *, flushes_paused: bool, version: str) -> None:
    """Checks that a pause can drop all caches, so that no old policy's state remains.

    Raises:
        ConfigError: it cannot.
    """
    if not flushes_paused and not engine_args.get("disable_radix_cache"):
        raise ConfigError(
            f"weights.advanced.kv_cache = 'recompute': SGLang {version} keeps its cache of "
            "prefixes while requests wait; set engines.rollout.args.disable_radix_cache = true, "
            "use 0.5.23 or newer, or keep the cache"
        )


def _check_size(size: Size, pool: str) -> None:
    """Checks the size: weights reach the ranks of an engine by tensor-parallel rank alone."""
    if size.data > 1 and not size.attention_data:
        raise ConfigError(
            f"{pool}.args.dp_size = {size.data}: replicas inside an engine cannot be "
            f"given weights; raise {pool}.count, or set enable_dp_attention = true"
        )
    if size.pipeline > 1:
        raise ConfigError(
            f"{pool}.args.pp_size = {size.pipeline}: stages of an engine cannot be given "
            f"weights; raise tp_size, over several nodes with {pool}.nodes_per_engine"
        )


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def command(python: str | None = None) -> list[str]:
    return [python or sys.executable, "-P", "-m", "relax_hpc.inference.sglang.serve"]


_PHASES = (
    ("server_args=", "starting its workers"),
    ("Init torch distributed begin", "joining its ranks"),
    ("Init parallel begin", "joining its ranks"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating the key-value cache"),
    ("CUDA graph begin", "capturing graphs"),
    ("Capturing batches", "capturing graphs"),
    ("max_total_num_tokens=", "starting its HTTP server"),
    ("Uvicorn running on", "warming up"),
)
"""Log text of 0.5.17 to 0.5.23, in the order of a start, and the phase that it begins."""

_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port is already in use", re.IGNORECASE)

_CAUSES = (
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static"
        r"|Loaded weights leave no GPU memory for the KV cache",  # 0.5.23
        "the weights leave no room for the key-value cache: raise "
        "{pool}.args.mem_fraction_static ({mem_fraction_static}) or tp_size ({tp_size})",
    ),
    (
        r"out of memory|can(?:'t|not) allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED",
        "out of memory: lower {pool}.args.mem_fraction_static ({mem_fraction_static}), "
        "max_total_tokens or {pool}.max_running_requests, or raise tp_size ({tp_size})",
    ),
    (
        r"tp_size == 0|(?:is not|must be) divisible by .*(?:tp|tensor)|is not divisible by",
        "the model does not divide by {pool}.args.tp_size ({tp_size}): use a divisor of "
        "its attention heads and of its layers' width",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device",
        "there are fewer GPUs than the engines of this node take: each takes tp_size ({tp_size}) "
        "of them; see {pool}.resources.gpus_per_node",
    ),
    (
        r"No module named '?sglang",
        "{pool}.resources.python names an interpreter without SGLang",
    ),
    (
        r"No module named '?relax_hpc",
        "{pool}.resources.python names an interpreter without this package",
    ),
    (
        r"error: unrecognized arguments|error: argument --",
        "SGLang refused an argument of {pool}.args",
    ),
)
"""Patterns, and remedies with the engine's arguments filled in. The first match counts, so special
cases come first."""


def phase(output: str) -> str:
    """Returns the phase of a server from its `output`. The newest marker counts: markers may
    repeat."""
    found = [(output.rfind(marker), doing) for marker, doing in _PHASES if marker in output]
    return max(found)[1] if found else "importing"


def port_taken(output: str) -> bool:
    """Whether another process took a port first; a retry uses other ports."""
    return _PORT_TAKEN.search(output) is not None


def remedy(output: str, engine_args: PassThrough, pool: str = "engines.rollout") -> str:
    """Returns a remedy for a start that ended with `output`; "" if none is known."""
    values = {
        "mem_fraction_static": engine_args.get("mem_fraction_static", "unset"),
        "tp_size": engine_args.get("tp_size", 1),
        "pool": pool,
    }
    for pattern, words in _CAUSES:
        if re.search(pattern, output, re.IGNORECASE):
            return words.format(**values)
    if port_taken(output):
        return "a port was taken by somebody else"
    return ""


def adapt_workers(gate: Path | None) -> None:
    """Makes this process's SGLang workers sample by our kernel on GPUs, load their modules at once,
    and take no GPU before `gate` exists.

    SGLang starts them by the name of a function, which `serve`, run as `__main__`, cannot give.
    """
    from sglang.srt.entrypoints import http_server

    worker = partial(_worker, gate, os.getpid())
    http_server.launch_server = partial(
        http_server.launch_server, run_scheduler_process_func=worker
    )


def _worker(gate: Path | None, server: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Runs SGLang's own worker once `gate` exists; ends if `server` does."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    controllers = os.getppid()  # the server, or what it starts workers with
    while gate and not gate.exists():
        if os.getppid() != controllers or not _lives(server):
            raise SystemExit(1)
        time.sleep(_POLL_S)
    if importlib.util.find_spec("triton"):
        from relax_hpc.inference.sglang import sampler

        sampler.install()
    return run_scheduler_process(*args, **kwargs)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
