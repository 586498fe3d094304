"""Gives the nodes of an idle side back.

    python -m relax_hpc.launch.holder RUN_DIR --side sampling --job-id ID --controller PID

Each of the two jobs' scripts runs it beside the components. It holds its own job when that has
nothing to do, and releases the other one.

Never may both be held, since nobody would start either again. So a side that wants to hold
1. raises its flag, a record that names its attempt,
2. reads the other side's flag,
3. asks Slurm for the other job,
4. follows `next_move`.

If both do so at once, at least one sees the other's flag. A flag belongs to an attempt: it is void
once Slurm has requeued that job.
"""

import argparse
import logging
import math
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from relax_hpc.bus.credits import CreditTail
from relax_hpc.config import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launch import record, requeue, states
from relax_hpc.launch.states import is_silent, output_of, words_of
from relax_hpc.roles.role import Side
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId
from relax_hpc.runtime.telemetry import logs

log = logging.getLogger(__name__)

Queued = Literal["active", "held", "ended", "unknown"]
"""active: it runs, or will start by itself. held: it starts when released. ended: it never starts.
unknown: Slurm does not answer."""

Move = Literal["hold", "release", "stay", "yield", "end"]
"""hold: give the nodes back. release: start the other job, and check again. stay: check again.
yield: lower the flag, and check again. end: the other job has ended, so no work will ever come."""


class SeenJob(NamedTuple):
    queued: Queued
    attempt: str = ""
    """Job id and number of restarts: "1234.0"."""


def other_side(side: Side) -> Side:
    return "training" if side == "sampling" else "sampling"


def next_move(side: Side, other: SeenJob, flag: str | None) -> Move:
    """Decides for an idle side with a raised flag.

    Args:
        other: the other job.
        flag: attempt in the other side's flag; None without a flag.
    """
    if other.queued == "unknown":
        return "stay"
    if other.queued == "ended":
        return "end"
    if other.queued == "held":
        return "release"
    if flag == other.attempt:  # it is about to be held
        return "yield" if side == "training" else "stay"
    return "hold"


_ENDING = "COMPLETING"
"""A job requeued with hold counts as held from then on; a release works while its last tasks end,
too. Suspended jobs also have no priority."""


def parse(job_id: str, text: str) -> SeenJob:
    """Parses `scontrol --oneliner show job`; the leader is in the first line."""
    found = dict(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0]))
    state = found.get("JobState", states.UNKNOWN)
    queued: Queued = "active"
    if state == states.UNKNOWN:
        queued = "unknown"
    elif not states.is_alive(state):
        queued = "ended"
    elif (states.is_waiting(state) or state == _ENDING) and found.get("Priority") == "0":
        queued = "held"
    return SeenJob(queued, f"{job_id}.{found.get('Restarts', '0')}")


class SlurmQueue:
    def look(self, job_id: str) -> SeenJob:
        """Asks Slurm for a job, by the id of its leader."""
        answer = output_of(["scontrol", "--oneliner", "show", "job", job_id])
        if answer.returncode:
            gone = not is_silent(answer) and "Invalid job id" in answer.stderr
            return SeenJob("ended" if gone else "unknown")
        return parse(job_id, answer.stdout)

    def release(self, job_id: str) -> bool:
        """Releases a held job; leaves others unchanged."""
        answer = output_of(["scontrol", "release", job_id])
        if answer.returncode:
            log.warning("job %s could not be released (%s)", job_id, words_of(answer))
        return not answer.returncode


LOOK_EVERY_S = 10.0
"""Seconds between checks; each asks Slurm while the side is idle."""
_ENDED_LOOKS = 2
"""Consecutive checks that must find the other job ended: it may have succeeded a moment ago."""
_REFUSED_S = 600.0
"""Seconds before the next attempt after Slurm refused to hold this job."""
_POLL_S = 0.2
_LEAVE_S, _RETRY_S = 600.0, 10.0
"""Longest time in which an ending side tries to release the other, and the interval."""


class Holder:
    """One side of a run, in one attempt of its job.

    Args:
        side: this job's.
        job_id: of its leader.
        slurm: answers for the other job.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        side: Side,
        job_id: str,
        slurm: SlurmQueue | None = None,
    ) -> None:
        self._config, self._paths, self._side, self._job_id = config, paths, side, job_id
        self._slurm, self._attempt = slurm or SlurmQueue(), requeue.attempt_of(job_id)
        self._credits = CreditTail(paths.bus, num_steps=config.num_steps)
        self._other: str | None = None
        self._num_ended = 0
        self._idle: tuple[list[float], float] | None = None
        """The tasks' last idle times, and when these were first seen."""
        self._not_before = 0.0

    def tick(self) -> Move | None:
        """Checks for work, and acts if there is none.

        Returns:
            The action; None if this side has work, or has been idle only briefly.
        """
        if self.is_announced:  # by a holder that died on the way
            self.hold()
            return "hold"
        idle_s, other = self.idle_s(), self.other_job()
        if idle_s is None or other is None or self.is_finished():
            self._lower()
            return None
        is_early = idle_s < self._config.launch.advanced.idle_s
        if is_early or time.monotonic() < self._not_before:
            self._release_held(other)  # it has made what work it can
            return None
        return self._go(other)

    def _go(self, other: str) -> Move:
        """Takes the steps towards giving nodes back, as far as possible now."""
        self.raise_flag()
        move = next_move(self._side, *self.see(other))
        self._num_ended = self._num_ended + 1 if move == "end" else 0
        if move == "release":
            self._slurm.release(other)
        elif move == "yield":
            self._lower()
        elif move == "end" and self._num_ended < _ENDED_LOOKS:
            return "stay"
        elif move == "hold":
            if not requeue.announce(self._job_id, self._paths.root, hold=True):
                return "stay"  # it is about to end for another reason
            self.hold()
        return move

    @property
    def is_announced(self) -> bool:
        """Whether this attempt is about to be held, and its tasks were told to save."""
        said = read_json(self._paths.ending(self._attempt)) or {}
        return bool(said.get("hold")) and not said.keys() & {"refused", "held"}

    def raise_flag(self) -> None:
        """Announces that this attempt is about to be held."""
        if self._flag(self._side) != self._attempt:
            write_json(self._paths.away(self._side), {"attempt": self._attempt})

    def see(self, other: str) -> tuple[SeenJob, str | None]:
        """Returns the other job, and its flag."""
        flag = self._flag(other_side(self._side))
        return self._slurm.look(other), flag

    def hold(self) -> None:
        """Holds this job once all is saved; Slurm then ends it.

        If Slurm refuses, or a save takes longer than `launch.advanced.peer_timeout_s`, all
        continue. Does not wait for the time limit.
        """
        paths, attempt = self._paths, self._attempt
        left_s, patience_s = (
            requeue.read_left_s(self._job_id),
            self._config.launch.advanced.peer_timeout_s,
        )
        limit_s = math.inf if left_s is None else left_s - requeue.MARGIN_S
        until = time.monotonic() + min(patience_s, limit_s)
        records = [paths.saves(attempt), paths.critic_saves(attempt), *paths.all_keeps(attempt)]
        while requeue.is_unsaved(records) and time.monotonic() < until:
            time.sleep(_POLL_S)
        refused = "a save was not done in time"
        if not requeue.is_unsaved(records) or limit_s < patience_s:  # then or never
            refused = requeue.ask(self._job_id, paths.root, until=until, hold_for=self._why())
        said = {"time": time.time(), "hold": True}
        if not refused:
            # Not asked a second time: by then it may have been released.
            write_json(paths.ending(attempt), said | {"held": True})
        else:
            log.error("the nodes are kept: %s", refused)
            self._not_before = time.monotonic() + _REFUSED_S
            write_json(paths.ending(attempt), said | {"refused": refused})
            self._lower()

    def _why(self) -> str:
        step = (read_json(self._paths.saves(self._attempt)) or {}).get("step")
        saved = "" if step is None else f", with step {step} saved"
        return f"{self._side} had nothing to do{saved}"

    def leave(self) -> None:
        """Releases the other side at the end of this one: it must finish, or notice the end."""
        until, other = time.monotonic() + _LEAVE_S, self.other_job()
        while other and not self._release_held(other) and time.monotonic() < until:
            time.sleep(_RETRY_S)

    def idle_s(self) -> float | None:
        """Seconds since all tasks of this side were first seen idle; None if one has work. Tasks'
        times are by their nodes' clocks, and only compared for equality."""
        names = self._reporters()
        records = [read_json(self._paths.idle(self._attempt, name)) or {} for name in names]
        said = [record["since"] for record in records if record.get("since") is not None]
        if len(said) < len(names):
            self._idle = None
            return None
        if self._idle is None or self._idle[0] != said:
            self._idle = said, time.monotonic()
        return time.monotonic() - self._idle[1]

    def is_finished(self) -> bool:
        """Whether training is complete: both sides end by themselves."""
        credit = self._credits.latest()
        return credit is not None and credit.finished

    def other_job(self) -> str | None:
        """The other job of this launch; None before it is recorded."""
        if self._other is None:
            with suppress(ConfigError):
                launched = record.read(self._paths.root)
                if self._job_id in launched.leaders:
                    self._other = next(
                        (each for each in launched.leaders if each != self._job_id), None
                    )
        return self._other

    def _reporters(self) -> list[str]:
        if self._side == "training":
            return ["actor-0"]
        nodes = self._config.rollout_pool.nodes_per_engine
        return [f"rollout-{host * nodes}" for host in range(self._config.rollout_pool.num_hosts)]

    def _release_held(self, other: str) -> bool:
        queued = self._slurm.look(other).queued
        if queued != "held":
            return queued != "unknown"
        log.info("%s has nothing to do: job %s, the other side, is released", self._side, other)
        return self._slurm.release(other)

    def _flag(self, side: Side) -> str | None:
        said = read_json(self._paths.away(side))
        return said["attempt"] if said else None

    def _lower(self) -> None:
        if self._flag(self._side) == self._attempt:
            storage.delete(self._paths.away(self._side))


def main() -> None:
    args = _parse()
    paths, config = job_file.enter_run(args.run_dir)
    logs.setup_beside_script("holder", logging.WARNING)
    logging.getLogger("relax_hpc.launch").setLevel(logging.INFO)
    assert isinstance(config, RunConfig)
    holder = Holder(config, paths, args.side, args.job_id)
    if args.leave:
        holder.leave()
        return
    controller = ProcessId.of(args.controller)
    every_s = min(LOOK_EVERY_S, config.launch.advanced.idle_s / 3)
    while script := controller.find():
        time.sleep(every_s)
        try:
            move = holder.tick()
        except (OSError, RelaxError) as error:
            log.warning("%s; looking again", error)
            continue
        if move == "end":
            words = f"the {other_side(args.side)} side has ended before the last step; resume it"
            requeue.tell(args.job_id, args.run_dir, "ended", words)
            script.send_signal(signal.SIGUSR1)
            return
    sys.exit(f"holder: process {args.controller}, the job script, is not there any more")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--side", required=True, choices=get_args(Side))
    parser.add_argument("--job-id", required=True, help="of the leader")
    parser.add_argument("--controller", type=int, help="end when this process ends")
    parser.add_argument("--leave", action="store_true", help="release the other side, and end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
