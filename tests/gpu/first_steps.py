"""`first_steps.py JOB [section.key=value ...]`: seconds to a run's first step, started and resumed.

The run is started on this machine, killed without notice once a checkpoint is there, and resumed.
"""

import os
import signal
import sys
import time
from pathlib import Path

from relax_hpc.config import job_file
from relax_hpc.launch import record, states
from relax_hpc.launch.submit import submit
from relax_hpc.runs import cancel, status
from relax_hpc.runs.resume import resume
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import Event, read_events

LIMIT_S = 400


def seen(run_dir: Path, name: str, since: float) -> Event:
    """The first event of that name after a time; waits for it while the run lasts."""
    while time.time() - since < LIMIT_S:
        for event in read_events(RunPaths(run_dir).events_folder):
            if event["event"] == name and event["time"] > since:
                return event
        if states.is_over(status.job_state(run_dir)):
            break
        time.sleep(0.2)
    sys.exit(f"{run_dir}: no event {name}: {status.collect(run_dir).reason}")


def show(run_dir: Path, what: str, since: float) -> None:
    begin = seen(run_dir, "start", since)["time"]
    step = seen(run_dir, "step", since)
    engines = seen(run_dir, "engine", since)["time"]
    print(
        f"{what}: step {step['step']} after {step['time'] - since:.1f} s; tasks began after "
        f"{begin - since:.1f}, an engine was healthy after {engines - since:.1f}",
        flush=True,
    )


def main() -> None:
    config = job_file.load(Path(sys.argv[1]), sys.argv[2:])
    run_dir, since = config.run_dir.absolute(), time.time()
    try:
        submit(config, local=True)
        show(run_dir, "submit", since)
        saved = seen(run_dir, "checkpoint", since)
        print(
            f"checkpoint of step {saved['step']}: {saved['bytes'] / 1e9:.2f} GB, training waited "
            f"{saved['wait_s']:.2f} s, complete after {saved['background_s']:.1f}", flush=True
        )  # fmt: skip
        controller = record.read(run_dir).controller
        assert controller is not None
        os.kill(controller.pid, signal.SIGKILL)  # its tasks are killed with it
        cancel.cancel(run_dir)  # returns when nothing is left
        since = time.time()
        resume(run_dir, local=True)
        show(run_dir, "resume", since)
    finally:
        if run_dir.exists() and not states.is_over(status.job_state(run_dir)):
            cancel.cancel(run_dir)


if __name__ == "__main__":
    main()
