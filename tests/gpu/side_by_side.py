"""`side_by_side.py RUNS.toml PACK [LIMIT]`: many measurements in little time, on idle GPUs.

RUNS.toml has a table for each: `command` (of bash, in this tree; $PACK is the folder given, $OUT
the run's own), `gpus`, `seconds` it is expected to take, and maybe `limit` (twice that) and
`after`, a run that has to have ended. They begin in the order of the file; a later one goes first
where GPUs are idle and it is over before the next can begin. What each says is in NAME/log of
$RESULTS, or of `side-by-side`. LIMIT seconds after the start all are ended.

Nothing is left behind: a run is a process group, which is ended with it.
"""

import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

BEGAN = time.time()
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """One of the file."""

    name: str
    command: str
    gpus: int
    seconds: float
    limit: float = 0.0
    after: str = ""
    own: list[int] = field(default_factory=list)
    since: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def left(self) -> float:
        """Seconds until it is expected to be over."""
        return max(self.seconds - (time.time() - self.since), 5.0)


def say(*words: object) -> None:
    print(f"{time.time() - BEGAN:7.1f}", *words, flush=True)


def begin(run: Run, free: list[int], pack: str, results: Path, rest: float) -> None:
    """Starts it on the first GPUs that are free."""
    run.own, run.since = [free.pop(0) for _ in range(run.gpus)], time.time()
    folder = results / run.name
    folder.mkdir(parents=True, exist_ok=True)
    visible = ",".join(map(str, run.own))
    env = os.environ | {"OUT": str(folder), "PACK": pack, "CUDA_VISIBLE_DEVICES": visible}
    limit = min(run.limit or 2 * run.seconds, rest)
    with (folder / "log").open("w") as log:
        run.process = subprocess.Popen(
            ["timeout", "--kill-after=20", f"{limit:.0f}", "bash", "-c", run.command],
            cwd=ROOT, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    say("begins", run.name, visible)


def end(run: Run, results: Path) -> None:
    """Says how it ended, and ends what it left."""
    assert run.process is not None
    with suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    say("ended", run.name, f"with {run.process.returncode}, {time.time() - run.since:.0f} s")
    lines = (results / run.name / "log").read_text(errors="replace").splitlines()
    print("\n".join("          | " + line[:200] for line in lines[-14:]), flush=True)


def wait(gpus: int, free: list[int], running: list[Run]) -> float:
    """Returns the seconds until so many GPUs are free, if all goes as expected."""
    count = len(free)
    for run in sorted(running, key=Run.left):
        if count >= gpus:
            break
        count += len(run.own)
        if count >= gpus:
            return run.left()
    return 0.0


def next_run(
    waiting: list[Run], free: list[int], running: list[Run], ended: set[str]
) -> Run | None:
    """Returns one that can begin now and holds up none in front of it."""
    held: Run | None = None
    for run in waiting:
        is_ready = (not run.after or run.after in ended) and run.gpus <= len(free)
        if is_ready and (
            held is None or not run.gpus or run.seconds <= wait(held.gpus, free, running)
        ):
            return run
        held = held or run
    return None


def main() -> None:
    tables = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    pack, limit = str(Path(sys.argv[2]).resolve()), float(sys.argv[3] if sys.argv[3:] else 1e9)
    results = Path(os.environ.get("RESULTS", "side-by-side")).resolve()
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    free, running = list(range(len(listed.stdout.splitlines()))), list[Run]()
    waiting, ended = [Run(name, **table) for name, table in tables.items()], set[str]()
    while waiting or running:
        for run in [each for each in running if each.process and each.process.poll() is not None]:
            running.remove(run)
            ended.add(run.name)
            free[:] = sorted(free + run.own)
            end(run, results)
        rest = limit - (time.time() - BEGAN)
        if rest < 40:
            waiting.clear()
        while run := next_run(waiting, free, running, ended):
            waiting.remove(run)
            running.append(run)
            begin(run, free, pack, results, rest)
        time.sleep(0.3)
    say("all")


if __name__ == "__main__":
    main()
