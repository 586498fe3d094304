"""Copies of the user's programs that a job names: a run goes on with those that it began with."""

import ast
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.user_programs import ORIGIN, place_of


def keep(config: JobConfig, folder: Path) -> JobConfig:
    """Copies the programs of a job, and the modules beside them that they import.

    Args:
        config: of absolute paths.
        folder: of the copies; made if there is any.

    Returns:
        The job that names the copies.

    Raises:
        OSError: one cannot be read or written.
    """

    def kept(name: str) -> str:
        return _kept(name, folder)

    if isinstance(config, RunConfig):
        return renamed(config, kept)
    if isinstance(config, SftRunConfig):
        paths = {"train": config.sft.train, "heldout": config.sft.heldout}
        copies = {key: Path(kept(str(path))) for key, path in paths.items() if path}
        return config.model_copy(update={"sft": config.sft.model_copy(update=copies)})
    return config


def named(config: RunConfig, folder: Path) -> RunConfig:
    """Returns the job that names the copies in a folder; makes none."""
    return renamed(config, lambda name: _of_copy(name, folder))


def renamed(config: RunConfig, named: Callable[[str], str]) -> RunConfig:
    """Returns a job whose programs have other names."""
    environment = named(config.rollout.environment)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"environment": environment}),
            "algorithm": config.algorithm.with_names(named),
            "reward": config.reward.with_names(named),
            "prompts": _of_prompts(config.prompts, named),
            "eval": {
                name: each.model_copy(update={"path": _of_paths(each.path, named)})
                for name, each in config.eval.items()
            },
        }
    )


def _of_prompts(prompts: PromptsConfig, named: Callable[[str], str]) -> PromptsConfig:
    sources = {
        name: each.model_copy(update={"path": _of_paths(each.path, named)})
        for name, each in prompts.sources.items()
    }
    return prompts.model_copy(update={"train": _of_paths(prompts.train, named), "sources": sources})


def _of_paths(paths: list[Path], named: Callable[[str], str]) -> list[Path]:
    return [Path(named(str(path))) for path in paths]


def _kept(name: str, folder: Path) -> str:
    if (place := place_of(name)) is not None and not (home := _home(place[0], folder)).exists():
        home.mkdir(parents=True)
        (home / ORIGIN).write_text(str(place[0]))
        for each in with_imports(place[0]):
            (home / each.name).write_bytes(each.read_bytes())
    return _of_copy(name, folder)


def _of_copy(name: str, folder: Path) -> str:
    if (place := place_of(name)) is None:
        return name
    file, attribute = place
    return f"{_home(file, folder) / file.name}:{attribute}"


def _home(file: Path, folder: Path) -> Path:
    return folder / hashlib.sha256(str(file).encode()).hexdigest()[:12]


def with_imports(file: Path) -> list[Path]:
    """Finds a program and the files beside it that it imports, or these do.

    Packages and files of data beside it are not among them: they are found where they are.
    """
    found, todo = dict[Path, None](), [file]
    while todo:
        if (each := todo.pop()) not in found:
            found[each] = None
            names = _imports(ast.parse(each.read_bytes()))
            beside = (file.with_name(f"{name}.py") for name in names)
            todo += [path for path in beside if path.is_file()]
    return list(found)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [each.name for each in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                modules = []
        yield from (name for name in modules if name not in sys.stdlib_module_names)
