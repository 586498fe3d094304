"""Builds the command line and options of the embedded engine."""

import difflib
import json
import sys
from pathlib import Path
from typing import NamedTuple, get_type_hints

from relax_hpc.errors import ConfigError
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.sections import PassThrough
from relax_hpc.trainer.models.architecture import Architecture


class EngineArgs(NamedTuple):
    """The arguments that `engines.NAME.args` may set for the embedded engine."""

    num_threads: int = 1
    version_spans: bool = True
    """Whether replies name the policy version of every token, or only the newest, as SGLang 0.5.17
    does."""


def computes(shape: Architecture) -> bool:
    """Whether the engine supports the model: dense, text only."""
    return shape.experts is None and shape.vision is None and shape.audio is None


def check(engine_args: PassThrough, pool: str = "engines.rollout") -> None:
    """Checks the arguments of a pool; messages name it `pool`.

    Raises:
        ConfigError: unknown argument or wrong type.
    """
    known = get_type_hints(EngineArgs)
    for key, value in engine_args.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0) or list(known)
            raise ConfigError(
                f"{pool}.args.{key}: the embedded engine has no such argument; "
                f"did you mean {close[0]}?"
            )
        if type(value) is not known[key]:
            raise ConfigError(f"{pool}.args.{key} = {value!r}: expected {known[key].__name__}")


def write_options(path: Path, spec: EngineSpec, *, token: str, port_file: Path, gpus: int) -> None:
    """Writes the options file of `server.serve`; the server writes its port to `port_file`."""
    options = EngineArgs()._asdict() | {
        **spec.args,
        "token": token,
        "port_file": str(port_file),
        "dtype": spec.dtype,
        "max_running_requests": spec.max_running_requests,
        "gpus": gpus,
    }
    path.write_text(json.dumps(options), encoding="utf-8")


def command(model_path: Path, host: str, options: Path, python: str | None = None) -> list[str]:
    module = "relax_hpc.inference.embedded.server"
    where = ["--model-path", str(model_path), "--host", host, "--options", str(options)]
    return [python or sys.executable, "-P", "-m", module, *where]
