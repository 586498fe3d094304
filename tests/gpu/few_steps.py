"""`few_steps.py JOB STEPS [section.key=value ...]`: some steps of a run here, and its figures.

The run is cancelled after them, without a checkpoint: one of 30 billion weights and what their
optimizer knows has 300 GB.
"""

import subprocess
import sys
import time
from pathlib import Path

from relax_hpc.config import job_file
from relax_hpc.launch import states
from relax_hpc.launch.submit import submit
from relax_hpc.runs import cancel, status
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

LIMIT_S = 560
FIGURES = Path(__file__).parent / "run_figures.py"


def wait_for(run_dir: Path, steps: int, since: float) -> str:
    """Returns when the trainer has made so many steps, with an error if it never will."""
    while time.time() - since < LIMIT_S:
        found = read_events(RunPaths(run_dir).events_folder)
        made = [each for each in found if each["event"] == "step" and each["role"] == "actor"]
        if len(made) >= steps:
            times = [f"{each['time'] - since:.1f}" for each in made]
            print(f"steps after {', '.join(times)} s", flush=True)
            return ""
        if states.is_over(status.job_state(run_dir)):
            return f"over before: {status.collect(run_dir).reason}"
        time.sleep(0.5)
    return f"not {steps} steps within {LIMIT_S} s"


def main() -> None:
    config = job_file.load(Path(sys.argv[1]), sys.argv[3:])
    run_dir, since = config.run_dir.absolute(), time.time()
    try:
        submit(config, local=True)
        error = wait_for(run_dir, int(sys.argv[2]), since)
    finally:
        if run_dir.exists() and not states.is_over(status.job_state(run_dir)):
            cancel.cancel(run_dir)
    subprocess.run([sys.executable, str(FIGURES), str(run_dir)], check=False)
    sys.exit(error or 0)


if __name__ == "__main__":
    main()
