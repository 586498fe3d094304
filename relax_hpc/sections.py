"""The common base of the sections of a job, and the requests of every component to Slurm."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

INT32, INT64 = 2**31 - 1, 2**63 - 1
FLOAT32 = 3.4e38

# Counts, steps and seconds end up in int32 columns, in C and in Slurm; true is no number.
Positive = Annotated[int, Field(strict=True, gt=0, le=INT32)]
NonNegative = Annotated[int, Field(strict=True, ge=0, le=INT32)]
Bytes = Annotated[int, Field(strict=True, gt=0, le=INT64)]
Number = Annotated[float, Field(strict=True, ge=-FLOAT32, le=FLOAT32)]


SETTINGS = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
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


def _name(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("is no path; name a file or a folder")
    if isinstance(value, str) and "$" in value:
        raise ValueError("variables are not put in; write the path out")
    if isinstance(value, str) and value.startswith("~"):
        try:
            return str(Path(value).expanduser())  # a folder that is named ~ invites rm -r ~
        except RuntimeError:
            raise ValueError("no home folder is known for ~; write the path out") from None
    return value


def _list(value: Any) -> Any:  # noqa: ANN401
    return value if isinstance(value, list) else [value]


def _as_slurm_writes(value: Any) -> Any:  # noqa: ANN401
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_number and value > INT32:
        raise ValueError(f"is more than Slurm takes; use at most {INT32}")
    return str(value) if is_number else value


def _one_line(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):  # it would end its line of the script
        raise ValueError("has a line break or another control character; remove it")
    return text


def _amount(text: str) -> str:
    if not re.fullmatch(r"\d+([KMGT]B?)?", text, re.IGNORECASE):
        raise ValueError('is no amount of memory; use "64G", or 65536 for megabytes')
    return text


def _count(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):  # one that names a type was taken apart before
        raise ValueError('is no number of GPUs; use 4 or "h100:4"')
    return value


def _mpi(value: Any) -> Any:  # noqa: ANN401
    return None if value in ("", "none") else value


Line = Annotated[str, AfterValidator(_one_line)]
"""Text for Slurm, in a line of its script."""
Spelled = Annotated[Line, BeforeValidator(_as_slurm_writes, json_schema_input_type=str | int)]
"""Text as Slurm writes it, or a bare number."""
GpuCount = Annotated[
    NonNegative, BeforeValidator(_count), WithJsonSchema({"type": ["integer", "string"]})
]
"""A number, or "h100:4" with their type, which becomes `gpu_type`."""


PassThrough = dict[str, Annotated[bool | int | float | str | list[Any], BeforeValidator(_plain)]]
UserPath = Annotated[Path, BeforeValidator(_name)]
"""Relative ones count from where the command is run, "~" is the home of who runs it."""
MaybeData = Annotated[
    list[UserPath], BeforeValidator(_list, json_schema_input_type=Path | list[Path])
]
"""One name, or a list of them, as `prompts.files` opens them; or none."""
Data = Annotated[MaybeData, Field(min_length=1)]
"""Likewise, but one at least."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of the name of a folder."""


class Section(BaseModel):
    model_config = SETTINGS


class SlurmRequest(Section):
    """A part of what is asked of Slurm that components may have in common."""

    partition: Line | None = None
    """`sbatch --partition`; `check` looks whether the cluster has it."""
    account: Line | None = None
    """`sbatch --account`: whom the hours are charged to."""
    qos: Line | None = None
    """`sbatch --qos`."""
    reservation: Line | None = None
    """`sbatch --reservation`."""
    constraint: Line | None = None
    """`sbatch --constraint`: features that its nodes must have."""
    exclude: Line | None = None
    """`sbatch --exclude`: nodes that it must not get, "n[3-4],n7"."""
    time: Spelled | None = None
    """Slurm time limit: minutes, "2-00:00:00" or "UNLIMITED", which 0 is, too; the rollout
    component's ends the whole job."""
    gpus_per_node: GpuCount = 0
    """GPUs of each node, shared by the component's tasks there: 4, or "h100:4" with their type; 0
    computes on CPUs."""
    gpu_type: Line | None = None
    """Type of these GPUs, as `sinfo -o %G` names it; unset takes any. It asks for none: say
    `gpus_per_node` as well, in a profile at least."""
    cpus_per_task: Positive | None = None
    """`sbatch --cpus-per-task`: cores of each task."""
    mem: Annotated[Spelled, AfterValidator(_amount)] | None = None
    """Memory per node, as Slurm writes it: "64G", or megabytes. Give every component one or
    none."""
    mpi: Annotated[Line | None, BeforeValidator(_mpi)] = None
    """`srun --mpi`: pmix for Open MPI, pmi2 for MPICH; unset takes the profile's, then "none"."""
    python: str | None = None
    """Interpreter of the tasks, which has this version of relax-hpc; unset is the one that submits,
    in a container python3."""
    container: str | None = None
    """Image that the tasks run in: a .sif or a folder by Apptainer, a .sqsh or a registry's name by
    pyxis. It sees the run directory; `setup` or `srun` name further folders."""
    setup: list[str] = []
    """Shell commands before the step, e.g. "module load cuda/12.8". One that fails ends the run and
    is named. The step runs `python`, whatever `conda activate` says."""
    sbatch: list[str] = []
    """Further #SBATCH options, e.g. "--exclusive", an option in each entry."""
    srun: list[str] = []
    """Further srun options, e.g. "--cpu-bind=none", likewise."""

    @model_validator(mode="before")
    @classmethod
    def _gpus_may_have_a_type(cls, asked: Any) -> Any:  # noqa: ANN401
        count = asked.get("gpus_per_node") if isinstance(asked, dict) else None
        if not isinstance(count, str):
            return asked
        match = re.fullmatch(r"(?:([A-Za-z][\w.-]*):)?(\d+)", count.removeprefix("gpu:"))
        if match is None:  # the field's own check says so
            return asked
        of_type = {"gpu_type": match[1]} if match[1] else {}
        return asked | of_type | {"gpus_per_node": int(match[2])}


class Resources(SlurmRequest):
    """Resources that one component asks Slurm for. Unset fields come from `[resources]`, from the
    site profile, then from Slurm."""

    nodes: Positive = 1
    """Nodes of this component; its tasks are dealt evenly over them."""
    max_nodes: Positive | None = None
    """Nodes that rollout holds; those beyond `nodes` are idle until `relax-hpc scale out`."""
    gpus: GpuCount | None = None
    """GPUs of all `nodes` together, as `sbatch --gpus`: 8 or "h100:8"; sets `gpus_per_node`."""

    @model_validator(mode="before")
    @classmethod
    def _gpus_are_dealt(cls, asked: Any) -> Any:  # noqa: ANN401
        if not isinstance(asked, dict) or asked.get("gpus") is None:
            return asked
        if "gpus_per_node" in asked:
            raise ValueError("takes either gpus or gpus_per_node; remove one of them")
        all_gpus, nodes = asked["gpus"], asked.get("nodes", 1)
        kind, colon, count = str(all_gpus).rpartition(":")
        is_count = count.isdecimal() and int(count) <= INT32 and not isinstance(all_gpus, bool)
        if not is_count or not isinstance(nodes, int):  # the fields' own checks say so
            return asked
        if nodes < 1 or int(count) % nodes:
            raise ValueError(f"gpus = {all_gpus!r}: does not divide over nodes = {nodes}")
        rest = {key: value for key, value in asked.items() if key != "gpus"}
        return rest | {"gpus_per_node": f"{kind}{colon}{int(count) // nodes}"}


class WholeJob(Section):
    """A part of what is asked of Slurm that is of the job, not of a component."""

    comment: Line | None = None
    """`sbatch --comment`, of the whole job."""
    mail: Line | None = None
    """Address that Slurm writes to when the job begins, ends, fails or is requeued."""
    dependency: Line | None = None
    """`sbatch --dependency` of a job that is submitted, e.g. "afterok:1234"; not of one that is
    resumed."""


class SharedResources(WholeJob, SlurmRequest):
    """Resources that every component asks for, unless its own table says otherwise; and what is
    asked for the whole job."""
