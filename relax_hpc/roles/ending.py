"""The end of a job that Slurm announces: what is said of it in the run directory, and by whom.

Whoever hears of it first writes `control/ending-<attempt>.json` (`launch.requeue`). Everybody looks
there: rollout publishes what is finished and keeps what is not, the trainer saves the step that it
has done and waits for the end. If the job is not requeued, the record says so, and all go on.
"""

import time
from functools import partial
from pathlib import Path

from relax_hpc import heartbeat
from relax_hpc.fleet import seen
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

LOOK_EVERY_S = 1.0
_POLL_S = 0.2


class Ending:
    """The announced end of one attempt, as one process sees it.

    Args:
        paths: of the run.
        attempt: of the job.
        saves: the record of what this process saves at the end; unset is that of the policy.
    """

    def __init__(self, paths: RunPaths, attempt: str, saves: Path | None = None) -> None:
        self._saves, record = saves or paths.saves(attempt), paths.ending(attempt)
        self._read = seen.follow(record, partial(read_json, record))
        critic = paths.critic_saves(attempt)
        self._read_critic = seen.follow(critic, partial(read_json, critic))
        self._critic_save_s = 0.0
        self._is_near, self._looked = False, -LOOK_EVERY_S

    def is_near(self) -> bool:
        """Whether the job is about to end; looks once a second at most."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            record, critic = self._read(), self._read_critic() or {}
            self._critic_save_s = float(critic.get("save_s", self._critic_save_s))
            self._is_near, self._looked = record is not None and "refused" not in record, now
        return self._is_near

    def critic_save_s(self) -> float:
        """Seconds that a save of the critic takes, as it said before the last look; 0 of none."""
        return self._critic_save_s

    def will_save(self, save_s: float = 0.0) -> None:
        """Says that the end is to wait for a save, as long as it can, and how long one takes."""
        write_json(self._saves, {"step": None, "save_s": save_s})

    def saved(self, step: int) -> None:
        """Says that this step, or what rollout keeps of so many prompt groups, is on disk, and that
        nothing is to be waited for."""
        write_json(self._saves, {"step": step})

    def wait(self) -> None:
        """Waits for the end; returns if it does not come."""
        with heartbeat.phase("end of the job", waits=True):
            while self.is_near():
                time.sleep(_POLL_S)
