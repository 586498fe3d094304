"""Renders a chat template once in a process with limited time and memory.

    python -m relax_hpc.data.template_trial < TEMPLATE_AND_VALUES_AS_JSON

A template is foreign code: transformers' sandbox denies it access, but limits neither time nor
memory, and cannot always interrupt it.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

MOST_CPU_S = 5
MOST_CHARACTERS = 1 << 26
MOST_BYTES = 1 << 31
_MOST_S = 300
_TOO_MUCH = 3
"""Exit code."""


def fault(template: str, values: Mapping[str, Any]) -> str:
    """Says which resource a template exhausts; "" if none, though it may fail otherwise."""
    command = [sys.executable, "-P", "-m", "relax_hpc.data.template_trial"]
    limits = {"cpu_s": MOST_CPU_S, "num_bytes": MOST_BYTES, "characters": MOST_CHARACTERS}
    asked = json.dumps({**limits, "template": template, "values": values}, default=str)
    try:
        tried = subprocess.run(
            command,
            input=asked.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # it waits, or the machine does
        return f"takes more than {_MOST_S} s"
    if tried.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"computes for more than {MOST_CPU_S} s"
    if tried.returncode == _TOO_MUCH:
        return (
            f"takes more than {MOST_BYTES >> 30} GiB, or makes more than {MOST_CHARACTERS:,} "
            "characters"
        )
    return ""


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Renders as transformers does, as far as time and memory go."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(said: str) -> None:
        raise ValueError(said)

    environment.filters["tojson"] = lambda value, **_: json.dumps(value, default=str)
    environment.globals |= {"raise_exception": refuse, "strftime_now": str}
    return environment.from_string(template).render(**values)


def main() -> None:
    asked = json.load(sys.stdin)
    import jinja2.sandbox  # noqa: F401 - before the limits

    cpu_s, num_bytes, characters = (asked.pop(k) for k in ("cpu_s", "num_bytes", "characters"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    used_s = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (used_s, used_s + 1))
    try:
        too_much = len(_render(**asked)) > characters
    except MemoryError:
        too_much = True
    except Exception:  # noqa: BLE001 - whoever renders it in earnest says what
        too_much = False
    sys.exit(_TOO_MUCH if too_much else 0)


if __name__ == "__main__":
    main()
