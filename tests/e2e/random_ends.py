"""Ends of a run under Slurm, of every kind that a bad week has, in random order."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from cluster import LOCAL_SLURM
from e2e_runs import cli, events_of, is_over, status, wait_for

from relax_hpc.errors import RelaxError
from relax_hpc.launch import record, states

FEW = {
    "announced": 3, "told to end": 1, "killed": 7, "component cancelled": 1, "node lost": 1,
    "controller lost": 1, "out of time": 1,
}  # fmt: skip
"""Kind of end -> how often, of fifteen."""
BRIEF = {"announced": 2, "told to end": 1, "killed": 12}
"""Likewise, of kinds that a run is back from in seconds."""


class Ended(NamedTuple):
    kind: str
    what: str
    step: int
    at_s: float
    """Seconds since the first one was to come."""


class Ends:
    """Ends a run again and again, and has it resumed where Slurm does not start it again.

    Args:
        run_dir: of a run that lasts long enough.
        slurm: folder of the local cluster.
        seed: of the order, and of what is hit.
    """

    def __init__(self, run_dir: Path, slurm: Path, seed: int) -> None:
        self._run_dir, self._slurm = run_dir, slurm
        self._random = random.Random(seed)
        self.done: list[Ended] = []

    def all_of(self, counts: dict[str, int]) -> None:
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        self._random.shuffle(kinds)
        begun = time.monotonic()
        for kind in kinds:
            step = self._step_after(max(self._steps(), default=0))
            at_s = round(time.monotonic() - begun, 1)
            self.done.append(Ended(kind, self._do(kind), step, at_s))

    def completes(self, stall_s: float = 180) -> dict:
        """Waits as long as steps are made, new ones or such as are made again: how long one takes
        is the machine's."""
        known, since = -1, time.monotonic()
        while (now := self._kept_going())["state"] != "COMPLETED":
            if (steps := len(self._steps())) != known:
                known, since = steps, time.monotonic()
            assert time.monotonic() - since < stall_s, (self.done, now, self._log())
            time.sleep(0.5)
        return now

    def _do(self, kind: str) -> str:
        return getattr(self, "_" + kind.replace(" ", "_"))()

    def _steps(self) -> list[int]:
        """All that were trained, one that was trained again as often."""
        return [each["step"] for each in events_of(self._run_dir, "actor", "step")]

    def _step_after(self, before: int, timeout_s: float = 240) -> int:
        """Waits until a step was trained that is newer, or was trained again."""
        begun, known = time.monotonic(), len(self._steps())
        while len(steps := self._steps()) == known:
            now = self._kept_going()
            assert now["state"] != "COMPLETED", f"over at step {before}, after {self.done}"
            assert time.monotonic() - begun < timeout_s, f"{self.done}\n{now}\n{self._log()}"
            time.sleep(0.5)
        return steps[-1]

    def _log(self) -> str:
        return cli("logs", self._run_dir)[-6000:]

    def _kept_going(self) -> dict:
        now = status(self._run_dir)
        # Slurm never starts a job again of which a component was cancelled; nor does it say so.
        states_of = {each["state"] for each in now["components"]}
        if now["state"] == "PENDING" and "CANCELLED" in states_of:
            cli("cancel", self._run_dir)
            now = status(self._run_dir)
        if is_over(now) and now["state"] != "COMPLETED":
            with suppress(RelaxError, AssertionError):  # Slurm may still be ending it
                cli("resume", self._run_dir)
            now = status(self._run_dir)
        return now

    def _components(self) -> list[str]:
        return [each.job_id for each in record.read(self._run_dir).components]

    def _announced(self) -> str:
        for each in self._components():
            subprocess.run(["scancel", "--signal=USR2", each], check=False)
        return "USR2"

    def _told_to_end(self) -> str:
        for each in self._components():
            subprocess.run(["scancel", "--signal=TERM", each], check=False)
        return "TERM"

    def _killed(self) -> str:
        pids = list(self._processes())
        pid = self._random.choice(pids)
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(pid).cmdline()
            os.kill(pid, signal.SIGKILL)
            return " ".join(command)[:200]
        return "gone already"

    def _processes(self) -> list[int]:
        """All that work for the run, in a fixed order: tasks, engines, watchdogs, boards, srun."""
        own = str(self._run_dir)
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(own in word for word in process.info["cmdline"] or ()):
                found.append(process.pid)
        return sorted(found)

    def _component_cancelled(self) -> str:
        hit = self._random.choice(self._components())
        subprocess.run(["scancel", hit], check=False)
        return hit

    def _node_lost(self) -> str:
        known = states.query([self._components()[0].partition("+")[0]]).known.values()
        nodes = sorted(each.nodes for each in known if each.nodes)
        node = self._random.choice(nodes) if nodes else "n1"
        self._local_slurm("node-crash", node)
        try:
            wait_for(lambda: self._is_down(node), 180)  # later where the controller began anew
        except AssertionError as error:
            raise AssertionError(f"{node} is {self._state_of(node)}") from error
        finally:
            self._local_slurm("node-start", node)
            subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
        return node

    def _is_down(self, node: str) -> bool:
        """Also where it is drained at once: its job's processes were still there at their end."""
        return "DOWN" in self._state_of(node)

    def _state_of(self, node: str) -> str:
        said = subprocess.run(
            ["scontrol", "show", "node", "-o", node], capture_output=True, text=True, check=False
        )  # the controller may be about to start
        return next((each for each in said.stdout.split() if each.startswith("State=")), "unknown")

    def _controller_lost(self) -> str:
        self._local_slurm("ctld-kill")
        time.sleep(self._random.uniform(1, 8))
        task = self._killed()
        time.sleep(2)
        self._local_slurm("ctld-start")
        return f"and meanwhile {task}"

    def _out_of_time(self) -> str:
        """Moves the limit so near that Slurm announces it at once, or ends the job at once."""
        leader = self._components()[0].partition("+")[0]
        self._limit(leader, "1")
        attempts = len(events_of(self._run_dir, "actor", "start"))
        deadline = time.monotonic() + 180
        while len(events_of(self._run_dir, "actor", "start")) == attempts:
            assert time.monotonic() < deadline, (self.done, self._kept_going(), self._log())
            self._kept_going()
            time.sleep(0.5)
        self._limit(self._components()[0].partition("+")[0], "60")
        return leader

    def _limit(self, leader: str, minutes: str) -> None:
        for each in states.query([leader]).known:
            change = ["scontrol", "update", f"JobId={each}", f"TimeLimit={minutes}"]
            subprocess.run(change, check=False, capture_output=True)

    def _local_slurm(self, *words: str) -> None:
        subprocess.run(
            [LOCAL_SLURM, *words, "--dir", self._slurm], check=True, timeout=60, capture_output=True
        )
