"""What Slurm says about a job, per component, with or without an accounting database."""

import functools
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from relax_hpc.launch.jobs import output_of

# What is left of a finished job is worth a look for as long as slurmctld keeps it (MinJobAge).
SQUEUE = ("squeue", "--states=all", "--array", "-o", "%i|%T|%N|%A")
SACCT = ("sacct", "-X", "--parsable2", "-o", "JobID,State,NodeList,JobIDRaw")


@dataclass(frozen=True, slots=True)
class SlurmState:
    """One component as Slurm sees it."""

    job_id: str
    """What squeue and sacct call it: "<leader>+<k>", or "<leader>" where it is alone."""
    state: str
    """One word: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ..."""
    nodes: str


@functools.cache
def has_accounting() -> bool:
    """Whether sacct answers here; without a database it only prints that it is disabled."""
    return shutil.which("sacct") is not None and not output_of([*SACCT, "-j", "1"]).returncode


def query(leader: str) -> dict[str, SlurmState]:
    """The components of a job by name; empty when Slurm has forgotten it.

    squeue knows a job at once and forgets it minutes after its end; sacct is the other way round.
    """
    states = {}
    if has_accounting():
        answer = output_of([*SACCT, "-j", leader])
        states = {state.job_id: state for state in _parse(answer.stdout.splitlines()[1:])}
    answer = output_of([*SQUEUE, "-h", "-j", leader])  # fails once the job is forgotten
    states |= {state.job_id: state for state in _parse(answer.stdout.splitlines())}
    return states


def _parse(lines: Iterable[str]) -> Iterable[SlurmState]:
    for line in lines:
        job_id, state, nodes, *_ = line.split("|")
        # sacct says who cancelled a job: "CANCELLED by 0".
        yield SlurmState(job_id, state.split()[0] if state else "UNKNOWN", nodes)
