"""Makes SGLang's workers load their modules at once and take no GPU before a file exists.

SGLang starts its workers by the name of a function, which `serve`, run as `__main__`, cannot give.
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

_POLL_S = 0.05


def install(gate: Path) -> None:
    """Makes this process's server workers wait for `gate`."""
    from sglang.srt.entrypoints import http_server

    worker = partial(_worker, gate, os.getpid())
    http_server.launch_server = partial(
        http_server.launch_server, run_scheduler_process_func=worker
    )


def _worker(gate: Path, server: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Runs SGLang's own worker once `gate` exists; ends if `server` does."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    controllers = os.getppid()  # the server, or what it starts workers with
    while not gate.exists():
        if os.getppid() != controllers or not _lives(server):
            raise SystemExit(1)
        time.sleep(_POLL_S)
    return run_scheduler_process(*args, **kwargs)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
