"""The standard library's logging, set up once per process with role, rank and host."""

import logging
import socket
from contextlib import suppress
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
    """Leaves out lines that storage does not take, and says how many once it does."""

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
