"""Sets up the standard library's logging once per process, with role, rank and host."""

import logging
import socket
import sys
from contextlib import suppress
from pathlib import Path

OF_ALL = {"of_all": True}
"""`extra` of a line that one rank logs for all."""


def setup_beside_script(who: str, level: int) -> None:
    """Sends the log of a process beside the job script to its stdout, which is the script's log."""
    logging.basicConfig(
        level=level,
        stream=sys.stdout,
        format=f"%(asctime)s {who}: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


def setup(role: str, rank: int, log_file: Path | None) -> None:
    """Sends this package's log to stderr and, from INFO on, to `log_file`.

    On stderr rank 0 logs from INFO on and the others from WARNING on, plus lines that are `OF_ALL`,
    so that one Slurm output file reads as one story. A second call replaces the setup.
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
        handlers.append(_LogFile(log_file))
    logging.raiseExceptions = False  # of what cannot be written nothing more is written
    package = logging.getLogger("relax_hpc")
    for old in list(package.handlers):
        package.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(form)
        package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # Megatron and SGLang configure the root logger as they please


class _LogFile(logging.FileHandler):
    """Drops lines that storage refuses, and logs their number afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self._dropped
        try:
            if self.stream is None:
                Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:  # it cannot be opened
            self._dropped += 1
        if before and self._dropped == before and self.stream:
            self._dropped = 0
            self.stream.write(f"{before} lines were dropped: storage did not take them\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        self._dropped += 1
        with suppress(OSError):
            self.close()  # what is buffered goes with it; the next line opens it anew
        self.stream = None
        super().handleError(record)
