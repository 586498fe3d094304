"""The identity of a task: what the launcher knows about it, handed to its role as a value."""

from dataclasses import dataclass

from relax_hpc.config.rollout import Transport
from relax_hpc.roles.training.admission import JobEnd


@dataclass(frozen=True, slots=True)
class TaskContext:
    """One task of one component, in one start."""

    component: str
    """Name in Slurm, logs, events and folders; `table.role_of` says which role it is of."""
    rank: int
    """Within the component."""
    size: int
    """Tasks of the component."""
    local_rank: int
    """Within the component and the node."""
    attempt: str
    """Job id and how often Slurm restarted that job: "1234.0"; new after a requeue."""
    start: int
    """Counts the starts of its step within the attempt, from 1."""
    node: str
    gpus: int = 0
    """GPUs of its node that its component asked for."""
    step_from: int = 0
    """Rank of the first task of its step, where the component has several."""
    transport: Transport | None = None
    """The way of weights to an engine that was added, if not as `weights.transport` says."""
    end: JobEnd | None = None
    """The end of the job, for a task that may have it requeued."""

    @property
    def name(self) -> str:
        return f"{self.component}-{self.rank}"

    @property
    def start_id(self) -> str:
        """Never used before by tasks that start together: names rendezvous records."""
        return f"{self.component}-{self.attempt}-{self.start}"
