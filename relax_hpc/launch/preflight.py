"""Checks a job before anything is queued. Each refusal names a remedy.

Where a check belongs, by what it needs to know: one section, its validator in `config`; several
sections, `config.checks`; the model, `trainer.megatron.fit`; a role's models, prompts or engines,
the role's `check.py`, or `roles.training.check` for all that train or score; where components lie,
`placement`; Slurm, `cluster`; this machine and the file system, here. Validators raise ValueError,
all else ConfigError; what is no error is told by `say`. Facts of models are read once, in
`roles.facts.Facts`, which `check` makes and every role's checks get.
"""

import importlib.metadata
import importlib.util
import math
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.config import programs
from relax_hpc.config.run import HTTP, JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import cluster, interpreter, known_runs
from relax_hpc.launch.placement import Component, sides
from relax_hpc.roles import table
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import Say
from relax_hpc.roles.training.check import (
    check_first_weights,
    check_model,
    check_rate,
)
from relax_hpc.runtime import hardware, kernel_cache
from relax_hpc.runtime.comm.mpi_door import MISSING, find_launcher
from relax_hpc.runtime.files import permissions, user_files
from relax_hpc.runtime.files.records import sync
from relax_hpc.runtime.telemetry.progress import short
from relax_hpc.runtime.text import is_utf8

_REMEDY = "choose a folder of yours that every node sees"
_CHOOSE_ANOTHER = (
    "a run needs that of a file system (docs/reference/file-systems.md); choose another"
)
_CLOSE = "chmod go-w what others may write, or use a copy of your own"
_INHERITED = ("account", "qos")
"""Fields that components of a heterogeneous job inherit, and that cannot be unset."""
_LIMITS = {
    "CPU": ("cpu time {} s (-t)", math.inf),
    "AS": ("address space {} bytes (-v)", math.inf),
    "FSIZE": ("file size {} bytes (-f)", math.inf),
    "NPROC": ("processes {} (-u)", 4096),
    "NOFILE": ("open files {} (-n)", 4096),
    "MEMLOCK": ("locked memory {} bytes (-l), which NCCL needs for RDMA", 1 << 30),
}
"""Limit -> its words, and an amount that is always enough."""
# Slurm replaces %x in file names, and reads a backslash as "replace nothing".
_REPLACED = "%\\\n"


def _silent(_: str) -> None:
    pass


def check(
    config: JobConfig,
    components: Sequence[Component],
    *,
    use_slurm: bool,
    say: Say = _silent,
    lacks: Say = interpreter.refuse,
) -> JobConfig:
    """Refuses a run that cannot work; `check_run_dir` checks its directory.

    Args:
        config: with absolute paths.
        components: with the site profile applied.
        use_slurm: also ask Slurm whether partitions and GPUs exist.
        say: gets messages on what can only be checked when the job starts.
        lacks: gets missing packages and GPUs, and may refuse.

    Returns:
        The run, with the steps of supervised fine-tuning counted.

    Raises:
        ConfigError: the first mistake found.
    """
    facts = Facts(config.model.path)
    check_model(config.model.path, config.actor, facts)
    facts.check_weights(config.model.path)
    check_first_weights(config.model.weights, facts.shape)
    table.check_columns(config)
    for role in table.ROLES:
        config = role.check_job(config, facts, say)
    check_boards(config)
    check_notify(config)
    tell_of_programs(config, say)
    check_rate(config, say)
    for component in components:
        check_component(component)
    check_torch(config, components, say)
    tell_mpi(components, say)
    doubt_times(components, say)
    for component in components:
        interpreter.check(
            component.key, component.resources, use_slurm=use_slurm, say=say,
            packages=_packages(config, component), lacks=lacks,
        )  # fmt: skip
    if use_slurm:
        hosts = [each for each in components if not each.on]
        slurm = cluster.Cluster()
        for part in sides(config, hosts):
            cluster.check_partitions(part, slurm.nodes)
            cluster.check_limits(part, slurm)
            tell_inherited(part, say)
            cluster.check_number(part, slurm)
        every = config.actor.save_every
        whose, save_s = known_runs.longest_save(config.model.path)
        cluster.check_preemption(
            hosts, slurm, save_every=every, save_s=save_s, whose=whose, say=say
        )
        tell_limits(components, slurm, say)
        tell_networks(components, slurm, say)
    else:
        check_gpus(components, lacks)
    check_kernel_cache(config, components, say)
    tell_meeting(config, say)
    tell_engines(config, components, say)
    return config


def tell_engines(config: JobConfig, components: Sequence[Component], say: Say) -> None:
    """Names the pools that run the small embedded engine on GPUs by default."""
    if not isinstance(config, RunConfig):
        return
    gpus_of = {each.name: each.resources.gpus_per_node for each in components}
    for each in components:
        pool = config.engines.get(each.name)
        if pool is None or "kind" in pool.model_fields_set or pool.kind != "embedded":
            continue
        if gpus_of[each.on or each.name]:
            say(
                f"engines.{each.name}.kind: is not set, so the small embedded engine samples on "
                'the GPUs that are asked for; "sglang" is the fast one, "embedded" if it is meant'
            )


def tell_limits(components: Sequence[Component], slurm: cluster.Cluster, say: Say) -> None:
    """Names resource limits of this process that would end tasks, if Slurm propagates them."""
    if any("--propagate" in option for option in components[0].resources.sbatch):
        return
    handed_on = slurm.config.get("PropagateResourceLimits", "ALL").upper()
    kept = slurm.config.get("PropagateResourceLimitsExcept", "(null)").upper()
    some, but = handed_on.split(","), [] if kept in ("", "(NULL)") else kept.split(",")
    found = []
    for name, (words, enough) in _LIMITS.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        limit = resource.getrlimit(kind)[name == "NOFILE"]  # tasks raise that one to the hard limit
        is_handed_on = name not in but and (but or name in some or "ALL" in some)
        matters = name != "MEMLOCK" or any(each.resources.gpus_per_node for each in components)
        if is_handed_on and matters and limit != resource.RLIM_INFINITY and limit < enough:
            found.append(words.format(limit))
    if found:
        say(
            f"limits of this shell: {', '.join(found)}: Slurm hands them on to the tasks, which "
            f'they may end; set {components[0].key}.sbatch = ["--propagate=NONE"], or submit from '
            "a shell without them (ulimit -a)"
        )


def tell_costs(config: JobConfig, components: Sequence[Component], say: Say) -> None:
    """Says what a run takes at most: GPU-hours of its time limits, and tokens sampled."""
    hosts = [each for each in components if each.on is None and each.resources.gpus_per_node]
    said = []
    if hosts:
        gpus = [each.resources.gpus_per_node * each.held_nodes for each in hosts]
        limits = [each.resources.time for each in hosts]
        known = [cluster.minutes(limit) for limit in limits if limit is not None]
        said.append(f"{sum(gpus)} GPU{'s' * (sum(gpus) > 1)}")
        if len(known) == len(hosts) and cluster.NO_LIMIT not in known:
            hours = sum(count * each / 60 for count, each in zip(gpus, known, strict=True))
            said[0] += f", {hours:,.1f} GPU-hours at most before a requeue"
    if isinstance(config, RunConfig):
        schedule, sampled = config.schedule, config.rollout
        responses = schedule.num_steps * schedule.prompts_per_step * sampled.samples_per_prompt
        tokens = short(responses * sampled.max_new_tokens)
        said.append(f"{responses:,} responses are trained on, of {tokens} tokens at most")
    if said:
        say(f"cost: {'; '.join(said)}")


def tell_networks(components: Sequence[Component], slurm: cluster.Cluster, say: Say) -> None:
    """Says what lets steps meet over Slingshot, where each has a network of its own."""
    is_asked = "job_vni=all" in slurm.config.get("SwitchParameters", "") or all(
        any(each.startswith("--network") and "job_vni" in each for each in host.resources.sbatch)
        for host in components
        if not host.on
    )
    is_one = components[0].bootstrap == "mpi_job" or sum(len(c.steps) for c in components) == 1
    has_gpus = any(each.resources.gpus_per_node for each in components)
    is_slingshot = "slingshot" in slurm.config.get("SwitchType", "")
    if is_slingshot and has_gpus and not is_asked and not is_one:
        say(
            "network: Slingshot gives each step a network of its own, in which NCCL does not reach "
            f'the others; set {components[0].key}.sbatch = ["--network=job_vni,single_node_vni"], '
            "in the profile at best (docs/reference/sites.md)"
        )


def tell_mpi(components: Sequence[Component], say: Say) -> None:
    """Says what ranks lack for Cray's plug-in, which MPICH's wheel does not speak to."""
    for each in components:
        lines = [*each.resources.setup, *os.environ]
        is_cray = each.bootstrap != "files" and each.resources.mpi == "cray_shasta"
        if is_cray and not any("MPI4PY_LIBMPI" in line for line in lines):
            say(
                f"{each.key}.mpi = 'cray_shasta': starts Cray MPICH only, not brought by pip; "
                "leave mpi out, and ranks meet through the run directory, or have setup load "
                "cray-mpich-abi and export MPI4PY_LIBMPI=$CRAY_MPICH_DIR/lib-abi-mpich/libmpi.so.12"
                " (engines join by MPICH's own launcher, without a plug-in)"
            )


def tell_inherited(components: Sequence[Component], say: Say) -> None:
    """Names options that sbatch passes on to later components.

    Args:
        components: of one job, in order, each with its own nodes.
    """
    for name in _INHERITED:
        said: Component | None = None
        for each in components:
            value = getattr(each.resources, name)
            if value is None and said is not None:
                say(
                    f"{said.key}.{name} = {getattr(said.resources, name)!r}: Slurm gives it to "
                    f"{each.key} as well, which names none; to have another, say {each.key}.{name}"
                )
            said = each if value is not None else said


def _packages(config: JobConfig, component: Component) -> list[str]:
    """Packages that a component's tasks import, and that may be missing."""
    pool = config.engines.get(component.name) if isinstance(config, RunConfig) else None
    return ["sglang"] if pool and pool.kind == "sglang" else []


def check_torch(config: JobConfig, components: Sequence[Component], say: Say) -> None:
    """Refuses what needs CUDA where this interpreter's torch is for AMD's GPUs.

    Raises:
        ConfigError: a pool of SGLang.
    """
    torch = importlib.metadata.version("torch")
    here = [c for c in components if not c.resources.python and not c.resources.container]
    asked = [each for each in here if each.resources.gpus_per_node]
    if "+rocm" not in torch or not asked:
        return
    for each in asked:
        if _packages(config, each):
            raise ConfigError(
                f"engines.{each.name}.kind = 'sglang': torch {torch} is for AMD's GPUs, and "
                'SGLang runs on CUDA only here; use "embedded"'
            )
    say(f"torch {torch}: is for AMD's GPUs, on which nothing was tried (docs/reference/sites.md)")


def check_gpus(components: Sequence[Component], lacks: Say = interpreter.refuse) -> None:
    """Calls `lacks` if this machine has too few GPUs for all components."""
    hosts = [each for each in components if each.on is None and each.resources.gpus_per_node]
    asked = sum(each.resources.gpus_per_node for each in hosts)
    if asked and (found := hardware.count_gpus()) < asked:
        said = ", ".join(
            f"{each.key}.gpus_per_node = {each.resources.gpus_per_node}" for each in hosts
        )
        lacks(
            f"{said}: {asked} GPUs of this machine, where the run is to be, and it shows {found}; "
            "ask for fewer (0 computes on CPUs), or start the run with Slurm"
        )


def tell_meeting(config: JobConfig, say: Say = _silent) -> None:
    """Says how engines will be asked into the group that gets weights, and why not better."""
    if not isinstance(config, RunConfig) or config.weights.transport != "collective":
        return
    if config.rollout_pool.placement == "actor":  # they share memory, and join nothing
        return
    bootstrap = config.launch.advanced.bootstrap
    if bootstrap in ("files", "http"):
        say(f"weights: engines join by {bootstrap} (launch.advanced.bootstrap)")
    elif bootstrap != "mpi_job" and find_launcher() is None:
        say(f"weights: engines join by HTTP: {MISSING}, here at least")
    else:
        say("weights: engines join by MPI")


def check_kernel_cache(
    config: JobConfig, components: Sequence[Component], say: Say = _silent
) -> None:
    """Checks that nobody else can write to the kernel cache, and reports its place."""
    root = config.launch.advanced.kernel_cache
    if root is None:
        if any(each.resources.gpus_per_node for each in components):
            say(
                "kernels: torch's are kept in each node's temporary folder, SGLang's in the caches "
                "of your home; launch.advanced.kernel_cache names one place for all, by version"
            )
        return
    if os.path.lexists(root):
        kernel_cache.check(root)
    kernel_cache.check_above(root)
    name = kernel_cache.folder_of(root).name
    say(f"kernels: are kept in {root}, those of this interpreter's versions in {name}")


def check_notify(config: JobConfig) -> None:
    """Checks that messages can be sent, without sending one."""
    command, webhook = config.notify.command, config.notify.webhook
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"notify.command = {command}: there is no program {command[0]} here; give its path"
        )
    if webhook is None:
        return
    url = user_files.read_text(webhook, "name a file with the URL of a webhook").strip()
    if "://" not in url or len(url.split()) != 1:
        raise ConfigError(f"notify.webhook = {str(webhook)!r}: holds no URL; put only that there")
    if not url.startswith(HTTP):
        check_apprise(f"notify.webhook = {str(webhook)!r}", url)
    if webhook.stat().st_mode & 0o077:
        raise ConfigError(
            f"notify.webhook = {str(webhook)!r}: others may read the URL; chmod 600 {webhook}"
        )


def check_apprise(key: str, url: str) -> None:
    """Checks that Apprise is here and knows a URL."""
    scheme = url.partition("://")[0]
    try:
        import apprise
    except ImportError:
        raise ConfigError(
            f"{key}: a URL {scheme}://... is for Apprise, which is not installed here; "
            "pip install 'relax-hpc[notify]'"
        ) from None
    if not apprise.Apprise().add(url):
        raise ConfigError(
            f"{key}: Apprise cannot use the URL {scheme}://... there; its pages say what such a "
            "URL looks like"
        )


def tell_of_programs(config: JobConfig, say: Say) -> None:
    """Names programs of a job that others may have written, or may write later."""
    for file in dict.fromkeys(programs.files_of(config)):
        if doubt := permissions.doubt_of(file):
            say(
                f"{file}: {doubt}, so others may write what runs as you; the run has a copy of it "
                f"and of the files beside it that it imports, and imports nothing else from there; "
                f"chmod -R go-w {file.parent}"
            )
    commands = {"notify.command": (Path(), config.notify.command)}
    if isinstance(config, RunConfig) and (agent := config.rollout.program) is not None:
        commands["rollout.program.command"] = agent.folder, agent.command
    for key, (folder, command) in commands.items():
        for file in [folder / (shutil.which(word) or word) for word in command]:
            if file.is_file() and (doubt := permissions.doubt_of(file)):
                say(f"{key}: {file}: {doubt}, so others may write what runs as you; {_CLOSE}")


def check_boards(config: JobConfig) -> None:
    """Checks that the exporters are installed."""
    for name in config.boards.export:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"boards.export = {config.boards.export}: the package {name} is not installed "
                f"here; pip install 'relax-hpc[{name}]'"
            )


def check_names(run_dir: Path) -> None:
    """Refuses folder names that are not UTF-8; relative paths count from here."""
    for folder in (run_dir, Path.cwd()):
        if not is_utf8(str(folder)):
            raise ConfigError(
                f"{folder}: its name is no UTF-8 text, as records and tokenizers need it; rename "
                "it, or run this in another folder"
            )


def with_free_name(config: JobConfig, say: Say = _silent) -> JobConfig:
    """Numbers a run whose name is taken: sort, sort-2, sort-3."""
    free, number = config, 1
    while os.path.lexists(free.run_dir):
        number += 1
        free = config.model_copy(update={"name": f"{config.name}-{number}"})
    if number > 1:
        say(f"name = {config.name!r}: is taken; this run is {free.name}")
    return free


def check_run_dir(run_dir: Path, *, say: Say = _silent) -> None:
    """Refuses a run directory that cannot be made, and warns if others may replace it."""
    key = f"run_root = {str(run_dir.parent)!r}"
    if any(character in str(run_dir) for character in _REPLACED):
        raise ConfigError(
            f"{key}: Slurm replaces '%' and '\\' in the names of log "
            "files; choose a folder without them"
        )
    try:
        existing = next(parent for parent in run_dir.parents if parent.exists())
        dangling = next((p for p in run_dir.parents if p.is_symlink() and not p.exists()), None)
        target = dangling and dangling.readlink()
        writable = os.access(existing, os.W_OK | os.X_OK, effective_ids=True)
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}; {_REMEDY}") from None
    if dangling:
        raise ConfigError(
            f"{key}: {dangling} is a link to {target}, which is not there; make that folder, or "
            "choose another"
        )
    if not existing.is_dir():
        raise ConfigError(f"{key}: {existing} is not a folder; {_REMEDY}")
    if not writable:
        raise ConfigError(f"{key}: {existing} cannot be written to; {_REMEDY}")
    check_file_system(key, existing, say)
    for folder, doubt in permissions.replaceable(run_dir).items():
        say(
            f"{key}: {folder} {doubt.why}: others may put a run directory of theirs in the "
            f"place of yours there; {doubt.remedy}"
        )


def check_file_system(key: str, folder: Path, say: Say) -> None:
    """Tests what a run needs of its file system (docs/reference/file-systems.md), in a temporary
    folder.

    Args:
        key: of the run root, in messages.
        folder: an existing one, where the run root is or will be.
        say: gets a message for each fallback.

    Raises:
        ConfigError: names what fails.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".relax-hpc-", dir=folder) as name:
            for what, attempt in _TRIED.items():
                _try(f"{key}: {folder}: {what}", Path(name), attempt)
            _try_links(f"{key}: {folder}", Path(name), say)
    except OSError as error:
        said = (
            f"cannot be written to: {error.strerror}; choose a folder of yours that every node sees"
        )
        raise ConfigError(f"{key}: {folder} {said}") from None


def _try(said: str, folder: Path, attempt: Callable[[Path], bool]) -> None:
    try:
        if attempt(folder):
            return
        why = "does not happen"
    except OSError as error:
        why = f"fails: {error.strerror}"
    raise ConfigError(f"{said} {why}; {_CHOOSE_ANOTHER}")


def _renames(folder: Path) -> bool:
    new, old = folder / "new", folder / "old"
    new.write_bytes(b"new")
    old.write_bytes(b"old")
    new.rename(old)
    return not new.exists() and old.read_bytes() == b"new"


def _keeps(folder: Path) -> bool:
    (folder / "kept").write_bytes(b"kept")
    sync(folder / "kept")
    sync(folder)
    return True


def _lets_one_have_a_name(folder: Path) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(folder / "own", flags))
    try:
        os.close(os.open(folder / "own", flags))
    except FileExistsError:
        return True
    return False


def _shows(folder: Path) -> bool:
    path = folder / "shown"
    with path.open("wb", buffering=0) as file:
        file.write(b"1")
        os.fsync(file.fileno())
        first = path.read_bytes()
        file.write(b"2")
        os.fsync(file.fileno())
        return (first, path.read_bytes()) == (b"1", b"12")


def _refuses_a_folders_name(folder: Path) -> bool:
    for name in ("first", "second"):
        (folder / name / name).mkdir(parents=True)
    try:
        (folder / "second").rename(folder / "first")
    except OSError:
        return (folder / "first" / "first").exists()
    return False


_TRIED: dict[str, Callable[[Path], bool]] = {
    "a rename that replaces a file": _renames,
    "fsync of a file and of a folder": _keeps,
    "O_EXCL, which lets one of two have a name,": _lets_one_have_a_name,
    "a file that shows what was written before fsync": _shows,
}


def _try_links(said: str, folder: Path, say: Say) -> None:
    """Without hard links, records with competing writers begin as folders."""
    for name in ("one", "other"):
        (folder / name).touch()
    try:
        os.link(folder / "one", folder / "taken")
    except OSError as error:
        what = "a folder that gets the name of another with something in it being refused"
        _try(f"{said}: {what}", folder, _refuses_a_folders_name)
        say(
            f"{said}: has no hard links ({error.strerror}); resumes, requests and announced ends "
            "are published by renaming folders, which does the same"
        )
        return
    try:
        os.link(folder / "other", folder / "taken")
    except FileExistsError:
        return
    raise ConfigError(f"{said}: a link to a name that is taken is not refused; {_CHOOSE_ANOTHER}")


def check_component(component: Component) -> None:
    """Checks one component's requests by themselves."""
    key, resources = component.key, component.resources
    if resources.time is not None:
        try:
            cluster.minutes(resources.time)
        except ValueError:
            raise ConfigError(
                f'{key}.time = {resources.time!r}: is not a time limit; '
                'use "D-HH:MM:SS", "HH:MM:SS", minutes or "UNLIMITED"'
            ) from None  # fmt: skip
    check_max_nodes(component)
    if 0 < resources.gpus_per_node < component.tasks_per_node:
        raise ConfigError(
            f"{key}.gpus_per_node = {resources.gpus_per_node}: {component.tasks_per_node} tasks "
            f"run on each node; ask for {component.tasks_per_node}, or for more nodes"
        )


def doubt_times(components: Sequence[Component], say: Say) -> None:
    """Warns once that Slurm reads "1:30" as minutes and seconds."""
    keys = {each.resources.time: f"{each.key}.time" for each in reversed(components)}
    for time, key in keys.items():
        if time and re.fullmatch(r"\d+:\d+", time):
            say(
                f"{key} = {time!r}: is {cluster.minutes(time)} min, as Slurm reads it "
                f'(minutes:seconds); hours are written "{time}:00"'
            )


def check_max_nodes(component: Component) -> None:
    """Only a scalable role may hold nodes for later engines; `max_nodes` includes its own nodes."""
    resources = component.resources
    if resources.max_nodes is None:
        return
    key = f"{component.key}.max_nodes = {resources.max_nodes}"
    if not component.is_scalable:
        able = " or ".join(table.scalable())
        raise ConfigError(
            f"{key}: only {able} can be scaled; remove it (a profile has it in [{able}])"
        )
    if resources.max_nodes < resources.nodes:
        raise ConfigError(
            f"{key}: is less than {component.key}.nodes = {resources.nodes}; "
            "use as many or more, or remove it"
        )
