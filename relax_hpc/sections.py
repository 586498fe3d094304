"""The common base of the sections of a job, and the requests of every component to Slurm."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INT32, INT64 = 2**31 - 1, 2**63 - 1
FLOAT32 = 3.4e38

# Counts, steps and seconds end up in int32 columns, in C and in Slurm; true is no number.
Positive = Annotated[int, Field(strict=True, gt=0, le=INT32)]
NonNegative = Annotated[int, Field(strict=True, ge=0, le=INT32)]
Bytes = Annotated[int, Field(strict=True, gt=0, le=INT64)]
Number = Annotated[float, Field(strict=True, ge=-FLOAT32, le=FLOAT32)]


SETTINGS = ConfigDict(
    extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
)
"""Settings of every section: an unknown key is an error, nothing is changed later, numbers are
finite."""


def _plain(value: Any) -> Any:  # noqa: ANN401
    # Said once, not for every type that it might have been.
    if not isinstance(value, bool | int | float | str | list):
        what = "a table" if isinstance(value, dict) else "a date or a time"
        raise ValueError(f"is {what}; a number, a string, true, false or a list is expected")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a finite number is expected")
    if isinstance(value, int) and not -INT64 <= value <= INT64:
        raise ValueError("has more than 64 bits; use a smaller number")
    for element in value if isinstance(value, list) else ():
        if not isinstance(element, dict):
            _plain(element)
    return value


def _named(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("is no path; name a file or a folder")
    return value


def _listed(value: Any) -> Any:  # noqa: ANN401
    return value if isinstance(value, list) else [value]


PassThrough = dict[str, Annotated[bool | int | float | str | list[Any], BeforeValidator(_plain)]]
UserPath = Annotated[Path, BeforeValidator(_named)]
"""Relative ones count from where the command is run."""
Data = Annotated[list[UserPath], BeforeValidator(_listed), Field(min_length=1)]
"""One name, or a list of them, as `prompts.files` opens them."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of the name of a folder."""


class Section(BaseModel):
    model_config = SETTINGS


class Resources(Section):
    """Resources that one component asks Slurm for. Unset fields come from the site profile, then
    Slurm."""

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
