"""The process that gives the nodes of an idle side back.

    python -m relax_hpc.launch.sides.holder RUN_DIR --side sampling --job-id ID --controller PID

The script of each of the two jobs starts it beside the components, and again should it die. It
holds its own job when that has nothing to do, and releases the other one.
"""

import argparse
import logging
import math
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol, get_args

from relax_hpc import job_file, permissions, storage
from relax_hpc.bus.credits import CreditTail
from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launch import record, requeue
from relax_hpc.launch.sides import queue
from relax_hpc.launch.sides.turn import Move, Seen, next_move, other_side
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.roles.role import Side

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
"""Seconds between looks; each is a question to Slurm while there is nothing to do."""
_ENDED_LOOKS = 2
"""Looks in a row that find the other job ended before that is believed: it may have ended well a
moment ago."""
_REFUSED_S = 600.0
"""Seconds that this job keeps its nodes after Slurm has refused to hold it."""
_POLL_S = 0.2
_LEAVE_S, _RETRY_S = 600.0, 10.0
"""Seconds in which a side that ends tries to release the other one; between two tries."""


class Queue(Protocol):
    """Slurm's queue, as far as the other job is concerned."""

    def look(self, job_id: str) -> Seen: ...
    def release(self, job_id: str) -> bool: ...


class Holder:
    """One side of a run, in one attempt of its job.

    Args:
        config: of the run.
        paths: of the run.
        side: whose job this is.
        job_id: of its leader.
        slurm: is asked for the other job.
    """

    def __init__(
        self, config: RunConfig, paths: RunPaths, side: Side, job_id: str, slurm: Queue = queue
    ) -> None:
        self._config, self._paths, self._side, self._job_id = config, paths, side, job_id
        self._slurm, self._attempt = slurm, requeue.attempt_of(job_id)
        self._credits = CreditTail(paths.bus, num_steps=config.num_steps)
        self._other: str | None = None
        self._num_ended = 0
        self._idle: tuple[list[float], float] | None = None
        """Times that the tasks said last, all without work, and when that was seen first."""
        self._not_before = 0.0

    def tick(self) -> Move | None:
        """Looks whether there is something to do, and does what follows if there is not.

        Returns:
            What was done; None if this side has work, or has not had none for long.
        """
        if self.is_announced:  # by a holder that died on the way
            self.hold()
            return "hold"
        idle_s, other = self.idle_s(), self.other_job()
        if idle_s is None or other is None or self.is_finished():
            self._lower()
            return None
        is_early = idle_s < self._config.launch.idle_s
        if is_early or time.monotonic() < self._not_before:
            self._release_held(other)  # it has made what work it can
            return None
        return self._go(other)

    def _go(self, other: str) -> Move:
        """Takes the steps of a side that wants to give its nodes back, as far as they go now."""
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
        """Whether this attempt is to be held, and is not yet; its tasks were told to save."""
        said = read_json(self._paths.ending(self._attempt)) or {}
        return bool(said.get("hold")) and not said.keys() & {"refused", "held"}

    def raise_flag(self) -> None:
        """Says that this attempt is about to be held."""
        if self._flag(self._side) != self._attempt:
            write_json(self._paths.away(self._side), {"attempt": self._attempt})

    def see(self, other: str) -> tuple[Seen, str | None]:
        """The other job, and its flag."""
        flag = self._flag(other_side(self._side))
        return self._slurm.look(other), flag

    def hold(self) -> None:
        """Holds this job once what it has is saved; Slurm ends all of it then.

        If Slurm refuses, or a save takes longer than `launch.peer_timeout_s`, all go on. The time
        limit of the job is not waited for.
        """
        paths, attempt = self._paths, self._attempt
        left_s, patience_s = requeue.left_s(self._job_id), self._config.launch.peer_timeout_s
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
        """Releases the other side at the end of this one: it has a last thing to do, or finds that
        nothing will come any more."""
        until, other = time.monotonic() + _LEAVE_S, self.other_job()
        while other and not self._release_held(other) and time.monotonic() < until:
            time.sleep(_RETRY_S)

    def idle_s(self) -> float | None:
        """Seconds since it was first seen that no task of this side has anything to do; None if one
        has. What a task says is by the clock of its node, and only tells one time from another."""
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
        """Whether nothing more will be trained: both sides end by themselves."""
        credit = self._credits.latest()
        return credit is not None and credit.finished

    def other_job(self) -> str | None:
        """The other job of this launch; None before it is on record."""
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
        """Whether the other side is known not to be held, or not to be held any more."""
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
    storage.settle()
    paths = RunPaths(args.run_dir)
    permissions.enter(paths)
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stdout,  # the log of the job script
        format="%(asctime)s holder: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("relax_hpc.launch").setLevel(logging.INFO)
    config = job_file.read_resolved(paths.config)
    assert isinstance(config, RunConfig)
    storage.settle(config.launch.peer_timeout_s, reserve=paths.reserve)
    holder = Holder(config, paths, args.side, args.job_id)
    if args.leave:
        holder.leave()
        return
    controller = ProcessId.of(args.controller)
    every_s = min(LOOK_EVERY_S, config.launch.idle_s / 3)
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
