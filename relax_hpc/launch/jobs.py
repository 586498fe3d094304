"""A job that was started, and Slurm's commands."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.comm.process_id import ProcessId

_SILENCE = re.compile(
    r"Unable to contact|Could not establish a configuration|timed out|[Cc]onnection (refused|reset)"
    r"|Zero Bytes|communication|Unable to resolve|[Cc]onnect failure|DNS SRV|No route to host"
)
"""Messages of Slurm's commands where the controller cannot be reached."""
_TASTES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SLURM_TIME_FORMAT")
"""Begins of variables by which a user has Slurm's commands show less, ask first, or write times in
another way."""


@dataclass(frozen=True, slots=True)
class StartedJob:
    """All components of one job."""

    job_id: str
    component_ids: tuple[str, ...]
    """Names of the components for `squeue` and `scancel`."""
    cancel: Callable[[], None]
    """Ends every component."""
    controller: ProcessId | None = None
    """The process that runs the script, without Slurm."""


def output_of(
    command: Sequence[str], timeout_s: float = 60, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a short command of Slurm's, whose text comes in one language.

    One that is not here, or gives no answer in time, has failed like any other: see `words_of`.
    """
    all_of_it = os.environ if environment is None else environment
    plain = {name: value for name, value in all_of_it.items() if not name.startswith(_TASTES)}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False,
            env=plain,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        said = f"no answer in {timeout_s:.0f} s"
    except OSError as error:
        said = f"cannot be run: {error.strerror}"
    return subprocess.CompletedProcess(command, returncode=-1, stdout="", stderr=said)


def words_of(answer: "subprocess.CompletedProcess[str]") -> str:
    """Why a command failed, in one line that begins with its name."""
    name = Path(answer.args[0]).name
    said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    lines = [re.sub(rf"^{name}: ((error|fatal): )?", "", line) for line in said]
    if is_silent(answer):
        lines = lines[-1:]  # before it, each of its tries
    return f"{name}: {'; '.join(lines) or f'exit code {answer.returncode}'}"


def is_silent(answer: "subprocess.CompletedProcess[str]") -> bool:
    """Whether a command failed because nobody answered it, and not because of what was asked."""
    return answer.returncode < 0 or bool(_SILENCE.search(answer.stderr))
