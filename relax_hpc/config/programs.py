"""Rewrites the names of files and programs in a job, and copies the user's programs into a run, so
that later changes do not affect it."""

import ast
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from relax_hpc.config import hub
from relax_hpc.config.run import JobConfig
from relax_hpc.runtime.files.user_files import absolute_data
from relax_hpc.runtime.files.user_programs import ORIGIN, absolute_place, place_of

_PATHS = (
    *("run_root", "model.weights", "launch.advanced.kernel_cache", "notify.webhook"),
    *("critic.advanced.weights", "prompts.media.advanced.folder", "rollout.program.folder"),
)
MODELS = ("model.path", "engines.*.model", "reference.path", "critic.path", "teachers.*.path")
"""Keys of models: folders, or names on the hub."""
DATA = ("prompts.train", "prompts.sources.*.path", "eval.*.path", "sft.train", "sft.heldout")
"""Keys of data, which may be a program's."""
_PROGRAMS = ("rollout.environment", "algorithm.*.name", "reward.name", "reward.terms.*.name")

C = TypeVar("C", bound=JobConfig)


def rewrite(config: C, keys: Iterable[str], change: Callable[[Any], Any]) -> C:
    """Returns a job with changed values.

    Args:
        keys: dotted; `*` is every table there. A key that the job does not have is skipped.
        change: gets each value but None, of a list each element.
    """
    return _rewrite_named(config, keys, lambda _, value: change(value))


def _rewrite_named(config: C, keys: Iterable[str], change: Callable[[str, Any], Any]) -> C:
    """Does as `rewrite`; `change` also gets the key, with the table's name for `*`."""
    for key in keys:
        config = _rewrite(config, key.split("."), change)
    return config


def _rewrite(
    node: Any,  # noqa: ANN401
    path: Sequence[str],
    change: Callable[[str, Any], Any],
    above: tuple[str, ...] = (),
) -> Any:  # noqa: ANN401
    if not path:
        key = ".".join(above)
        return [change(key, each) for each in node] if isinstance(node, list) else change(key, node)
    tables = node if isinstance(node, dict) else dict(node)
    inner = [name for name, each in tables.items() if isinstance(each, BaseModel)]
    names = inner if path[0] == "*" else [path[0]] if path[0] in tables else []
    # What is unset stays so: messages name the keys that a job sets.
    names = [name for name in names if tables[name] is not None]
    made = {name: _rewrite(tables[name], path[1:], change, (*above, name)) for name in names}
    changed = {name: each for name, each in made.items() if each is not tables[name]}
    if not changed:
        return node
    return node | changed if isinstance(node, dict) else node.model_copy(update=changed)


def find_models(config: C) -> C:
    """Returns a job whose models are folders: of names on the hub their snapshots in its cache.

    Raises:
        ConfigError: the cache lacks one.
    """
    return _rewrite_named(config, MODELS, hub.find)


def make_absolute(config: C) -> C:
    """Returns a job whose files and programs do not depend on the working directory, nor on what
    the hub's cache gets later."""
    config = rewrite(find_models(config), (*_PATHS, *MODELS), Path.absolute)
    return rewrite(rewrite(config, DATA, absolute_data), _PROGRAMS, absolute_place)


def keep(config: C, folder: Path) -> C:
    """Copies the programs of a job, and the modules beside them that they import.

    Args:
        config: with absolute paths.
        folder: for the copies; made if there are any.

    Returns:
        The job with the copies' names.

    Raises:
        OSError: one cannot be read or written.
    """
    for file in files_of(config):
        if not (home := _home(file, folder)).exists():
            home.mkdir(parents=True)
            (home / ORIGIN).write_text(str(file), encoding="utf-8")
            for each in with_imports(file):
                (home / each.name).write_bytes(each.read_bytes())
    return name_copies(config, folder)


def name_copies(config: C, folder: Path) -> C:
    """Returns the job with the names of the copies in a folder, without copying."""

    def copy_of(name: str | Path) -> str | Path:
        if (place := place_of(str(name))) is None:
            return name
        file, attribute = place
        return type(name)(f"{_home(file, folder) / file.name}:{attribute}")

    return rewrite(config, (*DATA, *_PROGRAMS), copy_of)


def files_of(config: JobConfig) -> list[Path]:
    """Returns the program files of a job."""
    names = names_in(config, (*_PROGRAMS, *DATA))
    return [place[0] for name in names if (place := place_of(str(name)))]


def names_in(config: JobConfig, keys: Iterable[str]) -> list[Any]:
    """Lists the values of keys, which are dotted as in `rewrite`."""
    names = list[Any]()

    def note(name: Any) -> Any:  # noqa: ANN401
        names.append(name)
        return name

    rewrite(config, keys, note)
    return names


def _home(file: Path, folder: Path) -> Path:
    return folder / hashlib.sha256(str(file).encode()).hexdigest()[:12]


def with_imports(file: Path) -> list[Path]:
    """Returns a program and the files beside it that it imports, also indirectly.

    Excludes packages and data files, which are used in place.
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
