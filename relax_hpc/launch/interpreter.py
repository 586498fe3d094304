"""The interpreter of a component's tasks: which, in which image, after which shell commands.

An image is run by Apptainer or by pyxis, a part of srun.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from relax_hpc.errors import ConfigError
from relax_hpc.sections import Resources

Runner = Literal["apptainer", "pyxis"]

_VERSION = "import json; from importlib import metadata as m; print(json.dumps(m.version('{}')))"
_HAS = (
    "import json; from importlib import util as u; s = u.find_spec('{}'); "
    "print(json.dumps(bool(s and s.origin)))"
)
"""A folder that happens to have the name of a package has no origin."""
_PACKAGE = "relax-hpc"
_LOOK_S = 60
_MOUNTS = "--container-mounts="


def runner(image: str) -> Runner:
    """Who runs an image: pyxis one of enroot (.sqsh) or a registry's name, Apptainer any other."""
    is_path = image.startswith("/") or "://" in image
    return "apptainer" if is_path and not image.endswith(".sqsh") else "pyxis"


def command(resources: Resources, run_root: Path, python: str) -> list[str]:
    """The begin of the command of a task: its interpreter, in the image if there is one.

    Args:
        resources: of the component.
        run_root: is seen in the image.
        python: the interpreter without an image, unless `resources` name one.
    """
    image = resources.container
    if image is None:
        return [resources.python or python]
    inside = resources.python or "python3"
    if runner(image) == "pyxis":
        return [inside]
    nvidia = ["--nv"] if resources.gpus_per_node else []
    return ["apptainer", "exec", *nvidia, "--bind", str(run_root), image, inside]


def found_anywhere(resources: Resources) -> Resources:
    """The same interpreter wherever a process is started: a relative path counts from here. One
    without a slash is looked up on the nodes, one in an image is the image's."""
    python = resources.python or ""
    if resources.container is not None or "/" not in python or " " in python:
        return resources
    return resources.model_copy(update={"python": str(Path(python).absolute())})


def srun_options(resources: Resources, run_root: Path) -> list[str]:
    """Options of srun for an image that pyxis runs, and those that `resources` name.

    Of an option of a plugin that is repeated srun keeps the last: all mounts are in one. That of
    the run directory comes last, where no other can hide it.
    """
    image = resources.container
    by_pyxis = image is not None and runner(image) == "pyxis"
    others = [each for each in resources.srun if not each.startswith(_MOUNTS)]
    said = [each.removeprefix(_MOUNTS) for each in resources.srun if each.startswith(_MOUNTS)]
    own = f"{run_root}:{run_root}"
    mounts = dict.fromkeys(each for entry in said for each in entry.split(",") if each)
    if by_pyxis:
        mounts.pop(own, None)
        mounts[own] = None
    return [
        *([f"--container-image={image}"] if by_pyxis else []),
        *([_MOUNTS + ",".join(mounts)] if mounts else []),
        *others,
    ]


def refuse(lack: str) -> None:
    """Raises ConfigError: without what is lacking the run cannot begin."""
    raise ConfigError(lack)


def check(
    key: str,
    resources: Resources,
    *,
    use_slurm: bool,
    say: Callable[[str], None],
    packages: Sequence[str] = (),
    lacks: Callable[[str], None] = refuse,
) -> None:
    """Looks at all of it as far as this machine sees it.

    Args:
        key: of the resources, in messages.
        resources: of a component.
        use_slurm: whether srun will start the tasks.
        say: is told what only a node can tell.
        packages: that its tasks import; this interpreter need not have them where Slurm starts the
            tasks, since a login node may have less than the others.
        lacks: is told of a package that is missing, and may refuse that.

    Raises:
        ConfigError: an image or an interpreter that is none, a command that is not whole.
    """
    for number, line in enumerate(resources.setup):
        _check_line(f"{key}.setup[{number}] = {line!r}", line)
    if resources.container is not None:
        _check_image(key, resources.container, use_slurm=use_slurm)
    elif resources.python is not None:
        said = f"{key}.python = {resources.python!r}"
        _check_python(said, resources.python, packages, resources, say, lacks)
    elif not use_slurm:
        said = f"{key}.python (unset, so {sys.executable})"
        _check_python(said, sys.executable, packages, resources, say, lacks)


def _check_line(said: str, line: str) -> None:
    parse = ["bash", "-n", "-c", line]
    answer = subprocess.run(parse, capture_output=True, text=True, check=False, timeout=_LOOK_S)
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()[0].partition(": line ")[2]
        raise ConfigError(
            f"{said}: is no whole command of bash ({reason.partition(': ')[2]}); write what "
            "belongs together in one entry"
        )


def _check_image(key: str, image: str, *, use_slurm: bool) -> None:
    said = f"{key}.container = {image!r}"
    if not image.startswith("/") and (image[:1] in ".~" or image.endswith((".sif", ".sqsh"))):
        raise ConfigError(f"{said}: is no absolute path; name the file from the root on")
    if image.startswith("/") and not Path(image).exists():
        raise ConfigError(f"{said}: no such file or folder; name an image that every node sees")
    if runner(image) == "pyxis" and not use_slurm:
        raise ConfigError(
            f"{said}: is run by pyxis, a part of srun; without Slurm use a .sif, or leave it out"
        )


def _check_python(
    said: str,
    python: str,
    packages: Sequence[str],
    resources: Resources,
    say: Callable[[str], None],
    lacks: Callable[[str], None],
) -> None:
    if any(letter.isspace() for letter in python) and not Path(python).exists():
        raise ConfigError(f"{said}: is one path, not a command; an image is named by `container`")
    if "/" not in python or (resources.setup and not Path(python).exists()):
        needs = ", ".join([f"{_PACKAGE} {_own()}", *packages])
        say(f"{said}: is looked up on the nodes, after `setup`; it needs {needs}")
        return
    if python != sys.executable:
        _check_version(said, python)
    for package in packages:
        if _ask(python, _HAS.format(package)):
            continue
        if resources.setup:
            say(f"{said}: has no {package}, unless `setup` adds it")
        else:
            lacks(
                f"{said}: has no {package}; install {package} into that environment, or name an "
                "interpreter that has it"
            )


def _check_version(said: str, python: str) -> None:
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise ConfigError(f"{said}: no such program; name an interpreter that every node sees")
    found = _ask(python, _VERSION.format(_PACKAGE))
    if found is None:
        raise ConfigError(
            f"{said}: has no {_PACKAGE}; install {_PACKAGE} {_own()} into that environment"
        )
    if found != _own():
        raise ConfigError(f"{said}: has {_PACKAGE} {found}, and this is {_own()}; install that")


def _ask(python: str, code: str) -> Any:  # noqa: ANN401
    """Returns what code prints in an interpreter, as JSON; None if it fails."""
    look = [python, "-c", code]
    try:
        answer = subprocess.run(
            look, capture_output=True, text=True, check=True, timeout=_LOOK_S, cwd="/"
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _own() -> str:
    return metadata.version(_PACKAGE)
