"""The identity of a process, which outlives the reuse of ids."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and when it started: an id alone may name another one later."""

    pid: int
    start_time: float

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, unless it has ended."""
        try:
            process = psutil.Process(self.pid)
            if process.create_time() != self.start_time:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None
