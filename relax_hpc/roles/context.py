"""Identifies a task: the facts that the launcher passes to its role."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from relax_hpc.config.rollout import TransportName
from relax_hpc.runtime.files.records import read_json, write_json


class JobEnd(Protocol):
    """The end of the allocation that a task runs in."""

    @property
    def ahead_s(self) -> float:
        """Returns how many seconds before the end Slurm announces it, which cuts off a running
        step."""
        ...

    def compute_left_s(self) -> float | None:
        """Returns seconds until the first of the job's components ends; None if unknown."""
        ...

    def announce(self) -> None:
        """Announces the end of the job as Slurm does, but sooner: it is requeued once all have
        saved."""
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """One task of one component, in one start."""

    component: str
    """Name in Slurm, logs, events and folders; `table.role_of` gives its role."""
    rank: int
    size: int
    local_rank: int
    attempt: str
    """Job id and number of Slurm restarts: "1234.0"; new after a requeue."""
    start: int
    """Number of its step's start within the attempt, from 1."""
    node: str
    gpus: int = 0
    """GPUs per node that its component requested."""
    step_from: int = 0
    """Rank of the first task of its step, if the component has several steps."""
    transport: TransportName | None = None
    """Transport of weights to an added engine, if not `weights.transport`."""
    end: JobEnd | None = None
    """The end of the job, for a task that may requeue it."""

    @property
    def name(self) -> str:
        return f"{self.component}-{self.rank}"

    @property
    def start_id(self) -> str:
        """Returns an id of this start, unique among tasks: names rendezvous records."""
        return f"{self.component}-{self.attempt}-{self.start}"


@dataclass(frozen=True, slots=True)
class Replay:
    """The record `control/replay.json`: the step to train again, its run, and the first step."""

    run_dir: Path
    step: int
    first: int
    """First step to train: `step`, or one before it."""
    checkpoint: Path | None
    """Checkpoint of the step before `first`; None begins with the job's model."""

    def write(self, path: Path) -> None:
        folder = self.checkpoint and str(self.checkpoint)
        write_json(path, asdict(self) | {"run_dir": str(self.run_dir), "checkpoint": folder})

    @classmethod
    def read(cls, path: Path) -> Self:
        fields = read_json(path)
        assert fields is not None, path
        folder = fields["checkpoint"] and Path(fields["checkpoint"])
        return cls(Path(fields["run_dir"]), fields["step"], fields["first"], folder)
