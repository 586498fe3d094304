"""Completes a run: summary and curves; the last line of the job script."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from relax_hpc.config import job_file
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import RelaxError
from relax_hpc.launch import record, states
from relax_hpc.launch.record import LaunchRecord
from relax_hpc.launch.script import batch_log
from relax_hpc.runs import status, summary, verdict
from relax_hpc.runs.boards.notify import Notifier
from relax_hpc.runs.boards.run_board import RunBoard, is_complete
from relax_hpc.runtime.paths import RunPaths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--exit-code", type=int, default=0, help="of the components")
    parser.add_argument("--ended", action="append", default=[], help="COMPONENT=EXIT_CODE")
    args = parser.parse_args()
    paths, config = job_file.enter_run(args.run_dir)
    found = summary.write(args.run_dir)
    complete(paths, config, failed=args.exit_code != 0)
    tell(paths, config, found["steps_done"], failed=args.exit_code != 0, ended=args.ended)


def tell(
    paths: RunPaths, config: JobConfig, step: int, *, failed: bool, ended: Sequence[str] = ()
) -> None:
    """Records the verdict, and notifies the owner if requested.

    Args:
        step: the last one done.
        failed: whether the run failed.
        ended: failed components, as COMPONENT=EXIT_CODE.
    """
    done, launched = f"{step} of {config.num_steps} steps", record.read(paths.root)
    if failed:
        why = verdict.explain(paths.root, launched, "FAILED").text
        silent = _silent(launched, ended)
        why = ": ".join(filter(None, [", ".join(silent), why])) or "for a reason unknown"
        verdict.give(paths.root, launched.leader, "ended", f"{why}; which ended the run")
        Notifier(paths, config).tell("failure", f"has failed after {done}: {why}", step=step)
    else:
        verdict.give(paths.root, launched.leader, "completed", f"completed, {done}")
        Notifier(paths, config).tell("finish", f"is complete, {done}", step=step)


def _silent(launched: LaunchRecord, ended: Sequence[str]) -> list[str]:
    """Describes components whose end the script's log does not mention."""
    lines = verdict.tail(batch_log(launched.folder, launched.leader))
    found = dict(each.rsplit("=", 1) for each in ended)
    return [
        f"{name} ended with exit code {code}, and its script did not say why"
        for name, code in found.items()
        if code != "143" and not any(f" {name}: " in line for line in lines)
    ]


def complete(paths: RunPaths, config: JobConfig, *, failed: bool) -> None:
    """Draws an ended run, unless its job's follower has drawn everything."""
    if not is_complete(paths, failed=failed):
        RunBoard(paths, config).end(failed=failed)


def report(run_dir: Path) -> bool:
    """Writes summary and curves of a run, so far.

    Returns:
        Whether it is over; otherwise the job's follower draws TensorBoard.
    """
    paths, state = RunPaths(run_dir), status.job_state(run_dir)
    config = job_file.read_resolved(paths.config)
    summary.write(run_dir)
    if over := states.is_over(state):
        complete(paths, config, failed=state != "COMPLETED")
    return over


def complete_if_over(run_dir: Path) -> None:
    """Draws what the follower could not, if the run is over."""
    paths = RunPaths(run_dir)
    with suppress(RelaxError, OSError):
        state, config = status.job_state(run_dir), job_file.read_resolved(paths.config)
        if states.is_over(state):
            complete(paths, config, failed=state != "COMPLETED")


if __name__ == "__main__":
    main()
