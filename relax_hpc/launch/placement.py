"""Derives the components of a run and their Slurm requests, without asking Slurm."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError, show
from relax_hpc.launch import interpreter, profiles
from relax_hpc.roles import table
from relax_hpc.roles.role import Place, Role, Side
from relax_hpc.sections import Resources, WholeJob

MOST_STEPS = 128
"""Most steps of a component, each an srun on the first node. With more tasks, a step takes all
tasks of a node; with more nodes, of several nodes."""
Bootstrap = Literal["mpi", "mpi_job", "files"]
SAME_NAME = (
    *("partition", "account", "qos", "reservation", "constraint", "exclude", "time"),
    *("cpus_per_task", "mem"),
)
"""Fields of Resources that are options of sbatch, with dashes for underscores."""
PASSED_ON = ("exclude", "reservation")
"""Options that sbatch passes on to later components unless they set them."""
_VARIABLES = {
    **{"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"},
    **{"reservation": "SBATCH_RESERVATION", "constraint": "SBATCH_CONSTRAINT"},
    "time": "SBATCH_TIMELIMIT",
}
"""Fields of Resources -> sbatch variables with their defaults."""
_SCRIPT = "the way in which a run is started"
_DEALT = (
    *("cpu-bind", "gpu-bind", "tres-bind", "accel-bind", "mem-bind", "exclusive", "multi-prog"),
    *("ntasks-per-gpu", "tres-per-task", "mem"),
)
"""Options of srun that distribute a step's resources to its tasks, or limit them together."""
_LETTERS = {
    **{"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task", "J": "job-name"},
    **{"o": "output", "e": "error", "p": "partition", "A": "account", "q": "qos"},
    **{"C": "constraint", "x": "exclude", "t": "time", "d": "dependency", "a": "array"},
    **{"W": "wait", "M": "clusters", "K": "kill-on-bad-exit", "u": "unbuffered", "r": "relative"},
    **{"w": "nodelist"},
}


@dataclass(frozen=True, slots=True)
class Component:
    """Tasks of one role, usually one component of the heterogeneous job."""

    name: str
    tasks: int
    resources: Resources
    bootstrap: Bootstrap = "files"
    """How its tasks find each other."""
    on: str | None = None
    """The component whose nodes and GPUs it shares; it then has none of its own."""
    section: str | None = None
    """Table of the job with its resources, if any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Default environment of its tasks on GPUs; the submitter's wins."""
    is_scalable: bool = False
    """Whether it may hold nodes for engines added later."""
    side: Side = "training"
    """The job it belongs to, if the run's sides are two jobs."""
    is_apart: bool = False
    """Whether its tasks are independent of each other."""

    @property
    def key(self) -> str:
        return f"{self.section or self.name}.resources"

    @property
    def has_pmix(self) -> bool:
        """Whether its tasks use PMIx, of any version."""
        return self.bootstrap != "files" and (self.resources.mpi or "").startswith("pmix")

    @property
    def nodes(self) -> int:
        return self.resources.nodes

    @property
    def held_nodes(self) -> int:
        """Nodes requested from Slurm; those beyond `nodes` idle until engines are added."""
        return self.resources.max_nodes or self.nodes

    @property
    def tasks_per_node(self) -> int:
        return self.tasks // self.nodes

    @property
    def gpus(self) -> str | None:
        """GPUs per node in Slurm's form: "4", "h100:4"."""
        count, kind = self.resources.gpus_per_node, self.resources.gpu_type
        return (f"{kind}:{count}" if kind else str(count)) if count else None

    @property
    def cpus_to_take(self) -> int:
        """CPUs that each step on a shared node takes; 0 takes all, if the number per task is
        unknown, or srun binds nothing."""
        unbound = any(each.startswith("--cpu-bind") for each in self.resources.srun)
        return 0 if unbound else self.resources.cpus_per_task or 0

    @property
    def steps(self) -> list[range]:
        """Ranks of each Slurm step: one task, all of some nodes, or all."""
        ranks, size = range(self.tasks), self.tasks
        if self.is_apart and self.bootstrap == "files" and self.on is None:
            size = self.tasks_per_node * math.ceil(self.nodes / MOST_STEPS)
            if self.tasks <= MOST_STEPS and not _is_dealt(self.resources):
                size = 1
        return [ranks[first : first + size] for first in ranks[::size]]

    def nodes_of(self, ranks: range) -> range:
        """Indices of the nodes of a step's tasks."""
        return range(ranks.start // self.tasks_per_node, -(-ranks.stop // self.tasks_per_node))


def place(config: JobConfig) -> list[Component]:
    """Returns the components of a run, in the order of the heterogeneous job.

    Raises:
        ConfigError: tasks do not divide over the nodes; MPI without its type; a GPU type without a
            number; or unknown options, or ones that the script sets.
    """
    profile = profiles.load(config.launch.profile)
    of_job = profile.merge_shared(config.resources)
    found: dict[str, Component] = {}
    for role, asked in table.places(config):
        if asked.beside is None:
            resources = profile.resources(role.profile, config.resources, asked.resources)
            resources = _with_variables(interpreter.make_absolute(resources))
            found[asked.component] = _component(config, role, asked, resources)
            _check_apart(config, found[asked.component])
            _check_gpus(config, asked, found[asked.component])
        else:
            guest = _component(config, role, asked, _beside(found[asked.beside], asked))
            found[asked.component] = replace(guest, on=asked.beside, bootstrap="files")
        _check_options(found[asked.component], of_job)
    return list(found.values())


def _is_dealt(resources: Resources) -> bool:
    """Whether a node's tasks must share a step: srun distributes its CPUs or GPUs to them, or
    unpacks an image per step."""
    image = resources.container
    if image is not None and interpreter.runner(image) == "pyxis":
        return True
    asked = (each for each in resources.srun if not each.endswith("-bind=none"))
    return any(
        option.startswith(name) for each in asked for name in _names(each) for option in _DEALT
    )


def _with_variables(resources: Resources) -> Resources:
    """Fills unset requests from the submitter's environment."""
    unsaid = {
        field: value
        for field, variable in _VARIABLES.items()
        if getattr(resources, field) is None and (value := os.environ.get(variable))
    }
    for name, value in unsaid.items():
        if not value.isprintable():
            raise ConfigError(
                f"${_VARIABLES[name]} = {show(value)}: has a line break or another control "
                "character; remove it"
            )
    return resources.model_copy(update=unsaid)


def _check_apart(config: JobConfig, component: Component) -> None:
    held = component.resources.max_nodes
    if held is not None and config.launch.layout == "separate":
        raise ConfigError(
            f"{component.key}.max_nodes = {held}: with launch.layout = 'separate' no engines are "
            "added; remove it, or set engines.rollout.count"
        )
    if config.launch.layout == "separate" and "--no-requeue" in component.resources.sbatch:
        raise ConfigError(
            f"{component.key}.sbatch = {component.resources.sbatch}: with launch.layout = "
            "'separate' an idle job is requeued, to give its nodes back; remove --no-requeue"
        )


def _check_gpus(config: JobConfig, asked: Place, component: Component) -> None:
    """Refuses a GPU type without a number, with which the job would run on CPUs."""
    kind = asked.resources.gpu_type or config.resources.gpu_type
    if kind and "gpus_per_node" not in component.resources.model_fields_set:
        raise ConfigError(
            f"{component.key}.gpu_type = {kind!r}: nobody says how many; set "
            f'{component.key}.gpus_per_node = "{kind}:1", or 0 to compute on CPUs'
        )


def _check_options(component: Component, job: WholeJob) -> None:
    """Refuses unknown options of sbatch or srun, and those that the script sets itself.

    Args:
        component: with options of its own.
        job: options for all components together.

    Raises:
        ConfigError: names the entry, and the key that sets the option.
    """
    key, resources = component.key, component.resources
    tasks = f"the number of tasks of [{key.removesuffix('.resources')}]"
    of_both = {
        "nodes": f"{key}.nodes",
        **dict.fromkeys(("ntasks", "ntasks-per-node"), tasks),
        **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), f"{key}.gpus_per_node"),
        **dict.fromkeys(("output", "error", "open-mode"), _SCRIPT),
    }
    said = [name for name in SAME_NAME if getattr(resources, name)]
    of_sbatch = {
        "job-name": "name",
        **dict.fromkeys(("signal", "array", "wait", "test-only"), _SCRIPT),
        "clusters": "the cluster of the machine on which the run is submitted",
        **{name.replace("_", "-"): f"{key}.{name}" for name in said},
        **({"comment": "resources.comment"} if job.comment else {}),
        **(dict.fromkeys(("mail-user", "mail-type"), "resources.mail") if job.mail else {}),
        **({"dependency": "resources.dependency"} if job.dependency else {}),
    }
    of_srun = {
        "mpi": f"{key}.mpi",
        **dict.fromkeys(("het-group", "job-name", "relative", "nodelist"), _SCRIPT),
        **dict.fromkeys(("kill-on-bad-exit", "wait", "unbuffered"), _SCRIPT),
        **({"cpus-per-task": f"{key}.cpus_per_task"} if resources.cpus_per_task else {}),
        **({"container-image": f"{key}.container"} if resources.container else {}),
    }
    for program, own in (("sbatch", of_sbatch), ("srun", of_srun)):
        for number, entry in enumerate(getattr(resources, program)):
            _check_entry(f"{key}.{program}[{number}] = {entry!r}", entry, of_both | own)


_ASKS_FOR_GPUS = re.compile(
    r"--(gres|tres-per-node|tres-per-task|tres-per-job)[=\s]+(.*,)?(gres[:/])?gpu\b"
)
"""Options that give a step GPUs unknown to the run, which would then compute on CPUs."""


def _check_entry(said: str, entry: str, own: Mapping[str, str]) -> None:
    if not re.match("--?[A-Za-z]", entry):
        raise ConfigError(
            f'{said}: is no option; write each in one entry that begins with it: "--option=value"'
        )
    if re.search(r"[\x00-\x08\n-\x1f\x7f]", entry):
        raise ConfigError(
            f"{said}: has more than one line, or a control character; write one option in each "
            "entry"
        )
    if _ASKS_FOR_GPUS.match(entry):
        raise ConfigError(f"{said}: GPUs are set by {own['gpus-per-node']}; remove it here")
    name, _, value = entry.partition("=")
    is_one_value = value[:1] in ("'", '"') or re.search(r"\s", name)
    if not is_one_value and re.search(r"\s--[a-z][\w-]*(=|\s|$)", value):
        raise ConfigError(
            f"{said}: has several options; write each in an entry of its own, or a value in quotes"
        )
    for name in _names(entry):
        # The programs take the begin of a long name, too.
        begun = [each for each in own if name and each.startswith(name)]
        if found := name if name in own else next(iter(begun), None):
            raise ConfigError(f"{said}: --{found} is set by {own[found]}; remove it here")


def _names(entry: str) -> Iterator[str]:
    """Yields the long names of an entry's options: "--exclusive -N 3" has two."""
    words = entry.split() if re.search(r"\s", entry.partition("=")[0]) else [entry]
    for word in words:
        if word.startswith("--"):
            yield word[2:].partition("=")[0]
        elif word.startswith("-") and word[1:2] in _LETTERS:
            yield _LETTERS[word[1]]


def sides(config: JobConfig, components: Sequence[Component]) -> list[list[Component]]:
    """Returns the components of each job of a run, rollout's first."""
    if config.launch.layout == "hetjob":
        return [list(components)]
    return [[c for c in components if c.side == side] for side in get_args(Side)]


def _beside(host: Component, asked: Place) -> Resources:
    """Returns the host's resources with the component's own fields."""
    own = {name: getattr(asked.resources, name) for name in asked.own_beside}
    said = {name: value for name, value in own.items() if value}
    return host.resources.model_copy(update=said)


def groups(components: Sequence[Component]) -> list[int]:
    """Returns each component's index in the heterogeneous job."""
    hosts = [component.name for component in components if component.on is None]
    return [hosts.index(component.on or component.name) for component in components]


def _component(config: JobConfig, role: Role[Any], asked: Place, resources: Resources) -> Component:
    made = Component(
        asked.component, asked.tasks, resources, "files", None,
        asked.section, role.environment, role.is_scalable, role.side, asked.is_apart,
    )  # fmt: skip
    key, tasks = made.key, made.tasks
    if tasks % resources.nodes:
        raise ConfigError(
            f"{key}.nodes = {resources.nodes}: {tasks} tasks do not divide over them; "
            f"use a divisor of {tasks}"
        )
    wanted = config.launch.advanced.bootstrap
    if wanted in ("mpi", "mpi_job") and resources.mpi is None:
        raise ConfigError(
            f"launch.advanced.bootstrap = {wanted!r}: {key}.mpi is not set; "
            "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
        )
    # pmi2 hangs in some layouts of nodes.
    if wanted == "mpi_job" and not (resources.mpi or "").startswith("pmix"):
        raise ConfigError(
            f"launch.advanced.bootstrap = 'mpi_job': {key}.mpi = {resources.mpi!r}; one world "
            "over several components needs 'pmix'"
        )
    if wanted == "auto":  # who has several steps has no world over them
        is_apart = asked.is_apart and tasks > 1
        wanted = "files" if resources.mpi is None or is_apart else "mpi"
    return replace(made, bootstrap="files" if wanted == "http" else wanted)
