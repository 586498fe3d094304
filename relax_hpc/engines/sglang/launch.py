"""Command line of a stock SGLang server, on GPU or on CPU."""

import argparse
import difflib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from relax_hpc.comm.orders import LOADER
from relax_hpc.engines.spec import Quantization
from relax_hpc.errors import ConfigError
from relax_hpc.media.recipe import is_shown_media
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
"""Argument of our own: a file that is there once the server may take its GPUs."""
_PROCESSORS = "relax_hpc.engines.sglang.processors"
_MODELS = "relax_hpc.engines.sglang.models"

_OURS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "seed",
    "max_running_requests": "{pool}.max_running_requests",
    "enable_return_routed_experts": "rollout.routed_experts",
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
"""Arguments that the run decides, and the key of the job that decides them."""

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
"""Other names that SGLang has for arguments that matter here."""

_ASKED_OFTEN = ["/model_info", "/v1/loads", "/health"]
"""Requests by which tasks look for versions and signs of life: a line each would fill the log."""

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
    """Variables of the server; the model of one that sees has its media made here."""
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


class Share(NamedTuple):
    """The part that one process is of an engine over several nodes."""

    nodes: int = 1
    rank: int = 0
    address: str = ""
    """"host:port" where the parts meet, of the first node; unused by one node alone."""


ALONE = Share()


def arguments(
    model_path: Path,
    *,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"],
    dtype: str,
    seed: int,
    max_running_requests: int,
    engine_args: PassThrough,
    routed_experts: bool = False,
    share: Share = ALONE,
    quantization: Quantization | None = None,
) -> list[str]:
    """Arguments of `serve`, which are those of SGLang, without the token (see `write_options`).

    Token ids go in and come out, so the server needs no tokenizer; versions count from 0.
    """
    settings: PassThrough = {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "incremental_streaming_output": True,  # else a chunk has everything so far, again and again
        "uvicorn_access_log_exclude_prefixes": _ASKED_OFTEN,
        **(_CPU_DEFAULTS if device == "cpu" else {}),
        **engine_args,
        "enable_return_routed_experts": routed_experts,
        "custom_weight_loader": [LOADER],
        "model_path": str(model_path),
        "host": host,
        "port": port,
        "dtype": dtype,
        "random_seed": seed,
        "weight_version": "0",
        "max_running_requests": max_running_requests,
    }
    if quantization is not None:  # the folder's weights are plain: the trainer sends the first ones
        settings["load_format"] = "dummy"
        settings["json_model_override_args"] = json.dumps({"quantization_config": quantization})
    if share.nodes > 1:
        settings["nnodes"], settings["node_rank"] = share.nodes, share.rank
        settings["dist_init_addr"] = share.address
    return as_flags(settings)


class Size(NamedTuple):
    """The GPUs that an engine takes, by how they work together."""

    tensor: int
    pipeline: int
    data: int
    attention_data: bool
    """Data parallel attention: its ranks are those of tensor parallelism."""

    @property
    def gpus(self) -> int:
        replicas = 1 if self.attention_data else self.data
        return self.tensor * self.pipeline * replicas


def size_of(engine_args: PassThrough, pool: str = "engines.rollout") -> Size:
    """Reads the size that a pool's arguments ask for, by whichever of SGLang's names."""
    named = {_ALIASES.get(key, key): value for key, value in engine_args.items()}

    def count(key: str) -> int:
        value = named.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{pool}.args.{key} = {value!r}: expected 1, 2, ...")
        return value

    attention = bool(named.get("enable_dp_attention", False))
    return Size(count("tp_size"), count("pp_size"), count("dp_size"), attention)


def write_options(path: Path, token: str) -> None:
    """Writes what must not stand on a command line, as a file for `--config` (JSON is YAML)."""
    path.write_text(json.dumps({"api-key": token}))


def read_token(path: Path) -> str:
    """Reads the token from a file of `write_options`."""
    return str(json.loads(path.read_text())["api-key"])


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

    Messages call the pool `pool`.

    Where it is not (a login node), the server's start is the check.

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
    """A switch is turned off by leaving it out; that has to be what false means."""
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
    """Checks that a pause can throw all caches away, so that nothing of an old policy is found.

    Raises:
        ConfigError: it cannot.
    """
    if not flushes_paused and not engine_args.get("disable_radix_cache"):
        raise ConfigError(
            f"weights.kv_cache = 'recompute': SGLang {version} keeps its cache of prefixes while "
            "requests wait; set engines.rollout.args.disable_radix_cache = true, use 0.5.23 or "
            "newer, or keep the cache"
        )


def _check_size(size: Size, pool: str) -> None:
    """Weights go to every rank of an engine by its tensor-parallel rank alone."""
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
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def command(python: str | None = None) -> list[str]:
    return [python or sys.executable, "-P", "-m", "relax_hpc.engines.sglang.serve"]
