"""When a process started, by a clock that nobody sets: with its number, that names it."""

from functools import cache
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in ticks since its node did; None if there is none.

    `psutil` adds the time at which the node started, which differs once its clock has been set.
    `engines/reaper.py` and `environments/program_keeper.py` read it themselves: they run as
    programs of their own, with the standard library alone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(fields.rpartition(b")")[2].split()[19])  # the name may have anything in it


@cache
def boot_id() -> str:
    """Names this start of the node; "" where Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
