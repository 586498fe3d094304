"""The standard library's logging, set up once per process with role, rank and host."""

import logging
import socket
from pathlib import Path

OF_ALL = {"of_all": True}
"""`extra` of a line that one rank says for all."""


def setup(role: str, rank: int, log_file: Path | None) -> None:
    """Sends what this package logs to stderr and, all of it from INFO on, to `log_file`.

    On stderr rank 0 speaks from INFO on and the others from WARNING on, so that one Slurm output
    file holds one story, of which others tell what is `OF_ALL`. Calling it again replaces the
    earlier setup.
    """
    form = logging.Formatter(
        f"%(asctime)s {socket.gethostname()} {role}-{rank} %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    stderr = logging.StreamHandler()
    stderr.addFilter(
        lambda record: rank == 0 or record.levelno >= logging.WARNING or hasattr(record, "of_all")
    )
    handlers: list[logging.Handler] = [stderr]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file))
    package = logging.getLogger("relax_hpc")
    for old in list(package.handlers):
        package.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(form)
        package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # Megatron and SGLang configure the root logger as they please
