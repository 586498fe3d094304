"""The identity of a process, which outlives the reuse of ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from relax_hpc.process_start import boot_id, start_ticks

_CLOCK_SET_S = 5.0
"""Seconds by which a clock may have been set since an older version noted a start time."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and when it started: an id alone may name another one later."""

    pid: int
    start_time: float = field(compare=False)
    """By the clock of its node, which may be set: it counts in older records only."""
    start_ticks: int | None = None
    """Ticks from the start of the node to its own; None in records of older versions."""
    boot_id: str = ""
    """The start of the node that these count from."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Identifies a process that is there.

        Raises:
            psutil.NoSuchProcess: it is not.
        """
        started, ticks = psutil.Process(pid).create_time(), start_ticks(pid)
        if ticks is None:
            raise psutil.NoSuchProcess(pid)
        return cls(pid, started, ticks, boot_id())

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """Takes one from a record that has its fields, maybe of an older version, and others."""
        ticks, booted = record.get("start_ticks"), record.get("boot_id", "")
        return cls(record["pid"], record["start_time"], ticks, booted)

    def find(self) -> psutil.Process | None:
        """The process, unless it has ended."""
        try:
            process = psutil.Process(self.pid)
            if not self._has_started(process):
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    def _has_started(self, process: psutil.Process) -> bool:
        """Whether the process that has this number now started when ours did."""
        if self.start_ticks is None:
            return bool(abs(process.create_time() - self.start_time) <= _CLOCK_SET_S)
        return (self.start_ticks, self.boot_id) == (start_ticks(self.pid), boot_id())
