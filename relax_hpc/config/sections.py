"""What the sections of a job have in common, and what every component asks Slurm for."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


SETTINGS = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
"""Of every section: an unknown key is an error, nothing is changed later."""


def _no_table(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):  # said once, not for every type that it might have been
        raise ValueError("is a table; a number, a string, true, false or a list is expected")
    return value


PassThrough = dict[str, Annotated[bool | int | float | str | list[Any], BeforeValidator(_no_table)]]


class Section(BaseModel):
    model_config = SETTINGS


class Resources(Section):
    """What one component asks Slurm for. Unset fields come from the site profile, then Slurm."""

    partition: str | None = None
    """`sbatch --partition`; `check` looks whether the cluster has it."""
    account: str | None = None
    """`sbatch --account`: whom the hours are charged to."""
    qos: str | None = None
    """`sbatch --qos`."""
    nodes: Positive = 1
    """Nodes of this component; its tasks are dealt evenly over them."""
    max_nodes: Positive | None = None
    """Nodes that rollout holds; those beyond `nodes` are idle until `relax-hpc scale out`."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node, shared by the component's tasks there; 0 computes on CPUs."""
    cpus_per_task: Positive | None = None
    """`sbatch --cpus-per-task`: cores of each task."""
    mem: str | None = None
    """Memory per node, as Slurm writes it: "64G". Give every component one or none."""
    time: str | None = None
    """Slurm time limit, "D-HH:MM:SS" or minutes; the rollout component's ends the whole job."""
    constraint: str | None = None
    """`sbatch --constraint`: features that its nodes must have."""
    mpi: str | None = None
    """`srun --mpi`: pmix for Open MPI, pmi2 for MPICH; unset takes the profile's, then none."""
    python: str | None = None
    """Interpreter of this component; unset is the one that submits."""
    setup: list[str] = []
    """Shell lines before the step: `module load ...`, `conda activate ...`."""
    sbatch: list[str] = []
    """Further #SBATCH options, e.g. "--exclusive"."""
    srun: list[str] = []
    """Further srun options."""
