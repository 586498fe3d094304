"""Command line of a stock SGLang server, on GPU or on CPU."""

import argparse
import difflib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from relax_hpc.comm.orders import LOADER
from relax_hpc.config import PassThrough
from relax_hpc.errors import ConfigError

ENVIRONMENT: dict[str, dict[str, str]] = {
    # /health then says that the server lives; by default it samples a token, and a paused server
    # could not.
    "cuda": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    "cpu": {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_USE_CPU_ENGINE": "1",
    },
}

_OURS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "seed",
    "max_running_requests": "rollout.max_running_requests",
    "host": None,
    "port": None,
    "api_key": None,
    "config": None,
    "weight_version": None,
    "custom_weight_loader": None,
}
"""Arguments that the run decides, and the key of the job that decides them."""

_CPU_DEFAULTS: PassThrough = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 32768,
}


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
) -> list[str]:
    """Arguments of `sglang.launch_server`, without the token (see `write_options`).

    Token ids go in and come out, so the server needs no tokenizer; versions count from 0.
    """
    settings: PassThrough = {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        **(_CPU_DEFAULTS if device == "cpu" else {}),
        **engine_args,
        "custom_weight_loader": [LOADER],
        "model_path": str(model_path),
        "host": host,
        "port": port,
        "dtype": dtype,
        "random_seed": seed,
        "weight_version": "0",
        "max_running_requests": max_running_requests,
    }
    return as_flags(settings)


def write_options(path: Path, token: str) -> None:
    """Writes what must not stand on a command line, as a file for `--config` (JSON is YAML)."""
    path.write_text(json.dumps({"api-key": token}))


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "disable_radix_cache": True}` -> `--tp-size 2 --disable-radix-cache`.

    False leaves a switch off; a list becomes several values.
    """
    flags: list[str] = []
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def check(engine_args: PassThrough) -> None:
    """Checks `rollout.engine_args` with SGLang's own parser, if SGLang is installed here.

    Where it is not (a login node), the server's start is the check.

    Raises:
        ConfigError: unknown argument, value of the wrong type, or one that the run decides.
    """
    for key in engine_args:
        if key in _OURS:
            remedy = f"set {_OURS[key]}" if _OURS[key] else "leave it out"
            raise ConfigError(f"rollout.engine_args.{key}: is set by the run; {remedy}")
    if importlib.util.find_spec("sglang") is None:
        return
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for key in engine_args:
        flag = f"--{key.replace('_', '-')}"
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            guess = f"; did you mean {close[0][2:].replace('-', '_')}?" if close else ""
            raise ConfigError(f"rollout.engine_args.{key}: SGLang has no {flag}{guess}")
    parser.parse_args(["--model-path", "model", *as_flags(engine_args)])


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"rollout.engine_args: {message}")


def command(python: str | None = None) -> list[str]:
    return [python or sys.executable, "-m", "sglang.launch_server"]
