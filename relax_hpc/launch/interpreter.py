"""Chooses the interpreter of a component's tasks, with image and set-up commands.

Apptainer or pyxis, a plugin of srun, runs an image.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from relax_hpc.errors import ConfigError
from relax_hpc.launch.supervision import SHELL_OPTIONS
from relax_hpc.runtime import process
from relax_hpc.sections import Resources

Runner = Literal["apptainer", "pyxis"]

_MARK = "relax-hpc was answered: "
_SAY = f"print('\\n{_MARK}' + json.dumps({{}}))"
_ANSWER = re.compile(f"^{_MARK}(.*)$", re.MULTILINE)
"""The answer is on its own line: a wrapper around the interpreter may print, too."""
_VERSION = "import json; from importlib import metadata as m; " + _SAY.format("m.version('{}')")
_HAS = "import json; from importlib import util as u; s = u.find_spec('{}'); " + _SAY.format(
    "bool(s and s.origin)"
)
"""A folder that merely shares a package's name has no origin."""
_PACKAGE = "relax-hpc"
_LOOK_S = 60
_OF_BASH = ("BASH_ENV", "ENV", *SHELL_OPTIONS)
"""Variables that make bash run a file first, or parse differently."""
_MOUNTS = "--container-mounts="


def runner(image: str) -> Runner:
    """Returns who runs an image: pyxis for enroot images (.sqsh) and registry names, else
    Apptainer."""
    is_path = image.startswith("/") or "://" in image
    return "apptainer" if is_path and not image.endswith(".sqsh") else "pyxis"


def command(resources: Resources, run_root: Path, python: str) -> list[str]:
    """Returns the start of a task's command: its interpreter, in the image if there is one.

    Args:
        run_root: mounted in the image.
        python: the default interpreter without an image.
    """
    image = resources.container
    if image is None:
        return [resources.python or python]
    inside = resources.python or "python3"
    if runner(image) == "pyxis":
        return [inside]
    nvidia = ["--nv"] if resources.gpus_per_node else []
    return ["apptainer", "exec", *nvidia, "--bind", str(run_root), image, inside]


def make_absolute(resources: Resources) -> Resources:
    """Makes a relative interpreter path absolute. A name without a slash is looked up on the nodes;
    one in an image is the image's."""
    python = resources.python or ""
    if resources.container is not None or "/" not in python or " " in python:
        return resources
    return resources.model_copy(update={"python": str(Path(python).absolute())})


def srun_options(resources: Resources, run_root: Path) -> list[str]:
    """Returns srun's options for a pyxis image, and the job's own.

    srun keeps only the last of a plugin's repeated options, so all mounts are in one. The run
    directory's comes last, where no other can hide it.
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
    """Checks interpreter, image and commands, as far as possible on this machine.

    Args:
        key: of the resources, in messages.
        use_slurm: whether srun will start the tasks.
        say: gets a message for what only a node can tell.
        packages: that its tasks import; with Slurm a login node may lack them.
        lacks: gets the name of a missing package, and may refuse.

    Raises:
        ConfigError: an unusable image, interpreter or command.
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
    plain = {name: value for name, value in os.environ.items() if name not in _OF_BASH}
    parse = ["bash", "--norc", "-n", "-c", line]
    answer = process.run(parse, _LOOK_S, environment=plain | {"LC_ALL": "C"})
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or [""])[0].partition(": line ")[2]
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
    """Runs code in an interpreter and parses its output as JSON; None if it fails."""
    look = [python, "-c", code]
    try:
        answer = process.run(look, _LOOK_S, folder=Path("/"))
        said = _ANSWER.findall(answer.stdout)
        return json.loads(said[-1]) if said and not answer.returncode else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _own() -> str:
    return metadata.version(_PACKAGE)
