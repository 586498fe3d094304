"""Loads job files (TOML -> JobConfig), and the resolved JSON of a run directory.

A section [sft] makes it a job of supervised fine-tuning; otherwise it is reinforcement learning.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from relax_hpc.algorithms.algorithm import unknown_setting
from relax_hpc.config.keys import keys_of
from relax_hpc.config.model import as_it_ran
from relax_hpc.config.moved import answer_to, refusal, with_advanced
from relax_hpc.config.run import JobConfig, RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError, LaunchError, nearest, show, without_number
from relax_hpc.runtime.files import permissions, storage, user_files
from relax_hpc.runtime.files.records import read_bytes
from relax_hpc.runtime.files.user_programs import place_of
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import is_utf8, wrong
from relax_hpc.sections import NAME, Resources, WholeJob

JOBS = Path(__file__).with_name("jobs")
_FEW = 2
"""Most suggestions of the same key in other sections."""
_ASK = "ask its owner"
_IN_NAMES = "use letters of a to z, digits, - and _, a letter first"


def list_jobs() -> dict[str, Path]:
    """Returns the job files that come along, by name."""
    return {path.stem: path for path in sorted(JOBS.glob("**/*.toml"))}


def load(job: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job file and applies `section.key=value` overrides; later ones win.

    Relative paths stay as written: they are resolved against the working directory later.

    Raises:
        ConfigError: unknown key, wrong type or value, bad syntax; one line per mistake.
    """
    return with_overrides(read_toml(job), overrides, source=str(job))


def with_overrides(tree: dict[str, Any], overrides: Sequence[str], *, source: str) -> JobConfig:
    """Applies `section.key=value` overrides to a parsed job, and validates it."""
    for override in overrides:
        _merge(tree, _parse_override(override))
    return validate(tree, source=source)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises:
    ConfigError: missing, not a file, empty, not text, or not TOML.
    """
    there = {each.name: each.stem for each in path.parent.glob("*.toml")}
    close = nearest(path.stem, there.values()) if path.name not in there else ""
    remedy = close.replace("?", ".toml?") or "name a TOML file; relax-hpc init NAME makes one"
    text = user_files.read_text(path, remedy)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; relax-hpc init NAME makes a TOML file")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; relax-hpc init NAME makes one") from None
    except ValueError as error:  # also of numbers with thousands of digits
        raise ConfigError(f"{path}: is not TOML: {error}; relax-hpc init NAME makes one") from error


def validate(tree: dict[str, Any], *, source: str) -> JobConfig:
    """Validates a parsed job; `source` begins every message."""
    kind = _kind(tree)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = _explain(error, tree)
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from error


def read_resolved(path: Path, *, run_dir: Path | None = None) -> JobConfig:
    """Reads the resolved JSON of a run directory, which may have been moved.

    Args:
        run_dir: the directory; default is the parent of `path`.

    Raises:
        ConfigError: it is missing, empty, or not from `submit`; it names a program to be run here
            that others may have written; or the directory's name is impossible for a run.
    """
    folder = (run_dir or path.parent).absolute()
    try:
        text = read_bytes(path).decode()
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise TypeError("it is not a table")
        tree = _as_it_ran(_resolve_folder(folder, tree))
        _check_programs(path, folder, tree)
        return _kind(tree).model_validate_json(json.dumps(tree))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: is not a run directory (no {path.name})") from None
    except LaunchError as error:
        raise ConfigError(f"{path}: names a program that is run to read it; {error}") from None
    except ValidationError as error:
        reason = next(_explain(error, tree))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = without_number(error)
    raise ConfigError(
        f"{path}: is not the job that submit wrote there ({reason}); restore it, or submit the run "
        "under another name"
    )


def enter_run(run_dir: Path) -> tuple[RunPaths, JobConfig]:
    """Enters a run in a process beside its script: modes of files, patience with storage."""
    storage.settle()
    paths = RunPaths(run_dir)
    permissions.enter(paths)
    config = read_resolved(paths.config)
    storage.settle(config.launch.advanced.peer_timeout_s, reserve=paths.reserve)
    return paths, config


def _resolve_folder(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Adapts the job of a moved directory: its name, and paths inside it."""
    was = Path(str(tree.get("run_root", folder.parent)), str(tree.get("name", folder.name)))
    try:
        if was == folder or was.samefile(folder):
            return tree
    except OSError:  # there is none any more, or none that can be seen from here
        pass
    while folder.is_symlink():
        folder = folder.parent / folder.readlink()
    if not re.fullmatch(NAME, folder.name):
        raise ConfigError(
            f"{folder}: is no name of a run, which has letters, digits, dots, _ and -; rename it"
        )
    below, here = f"{was}/", f"{folder}/"

    def move(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {key: move(each) for key, each in value.items()}
        if isinstance(value, list):
            return [move(each) for each in value]
        if isinstance(value, str) and value.startswith(below):
            return here + value.removeprefix(below)
        return value

    return {**move(tree), "run_root": str(folder.parent), "name": folder.name}


def _as_it_ran(tree: dict[str, Any]) -> dict[str, Any]:
    """Accepts the job of an older run, even if a new job like it would be refused."""
    tree = with_advanced(tree)
    actor = tree.get("actor")
    if not (isinstance(actor, dict) and isinstance(actor.get("optimizer"), dict)):
        return tree
    return {**tree, "actor": {**actor, "optimizer": as_it_ran(actor["optimizer"])}}


def _check_programs(path: Path, folder: Path, tree: dict[str, Any]) -> None:
    """Checks that nobody else can have written the programs that validation imports.

    Args:
        path: of the job.
        folder: of the run.
        tree: the job.

    Raises:
        LaunchError: somebody else can.
    """
    algorithm = tree.get("algorithm")
    parts = algorithm.values() if isinstance(algorithm, dict) else ()
    names = [str(part.get("name", "")) for part in parts if isinstance(part, dict)]
    names = [name for name in names if ":" in name]
    if names:
        permissions.check_run(RunPaths(folder), path.parent, path, remedy=_ASK)
    for file in {place[0] for name in names if (place := place_of(name))}:
        run = RunPaths(file.parent.parent.parent)  # a replay names the copies of its run
        if run.programs == file.parent.parent and run.root != folder:
            permissions.check_run(run, remedy=_ASK)


def _kind(tree: dict[str, Any]) -> type[JobConfig]:
    return SftRunConfig if "sft" in tree else RunConfig


def _parse_override(override: str) -> dict[str, Any]:
    key, sep, value = override.partition("=")
    key, value = key.strip(), value.strip()
    if not sep or not key:
        raise ConfigError(f"--set {override}: expected section.key=value")
    if not is_utf8(override):
        raise ConfigError(f"--set {override}: is no UTF-8 text, as a job and names of files are")
    try:
        tomllib.loads(f"{key} = 0")
    except ValueError:
        raise ConfigError(f"--set {override}: {key} is no key; write section.key=value") from None
    word = json.dumps(value, ensure_ascii=False)  # a bare word is a string
    for text in (f"{key} = {value}", f"{key} = {word}"):
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError):
            continue
    raise ConfigError(f"--set {show(override)}: the value is not TOML")


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _explain(error: ValidationError, tree: dict[str, Any]) -> Iterator[str]:
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"] if part != "[key]")
        if answer := refusal(item["loc"]):
            yield f"{key} = {show(item['input'])}: {answer}"
        elif item["type"] == "extra_forbidden":
            yield f"{key} = {show(item['input'])}: {_unknown(item['loc'], item['input'], tree)}"
        elif item["type"] == "missing":
            yield f"{key}: is required; add it to the job"
        elif item["type"] == "model_type":
            inside = _inside(item["loc"], tree)
            yield f"{key} = {show(item['input'])}: is a table of settings; {inside}"
        elif item["type"] == "string_pattern_mismatch" and item["loc"][0] != "algorithm":
            yield f"{key} = {show(item['input'])}: {_IN_NAMES}"
        else:
            said = wrong(item)
            yield f"{key} = {show(item['input'])}: {said}" if key else said


def _inside(loc: tuple[int | str, ...], tree: dict[str, Any]) -> str:
    if loc[0] == "algorithm" and len(loc) > 1:  # of the parts that are chosen
        return "see docs/explanation/algorithms.md"
    return f"it takes {', '.join(_section(loc, _kind(tree)).model_fields)}"


def _unknown(loc: tuple[int | str, ...], value: object, tree: dict[str, Any]) -> str:
    kind = _kind(tree)
    if kind is SftRunConfig and loc[0] in RunConfig.model_fields:
        return "a job with [sft] has no rollout and does not take it; remove it, or [sft]"
    if "resources" in loc[1:] and loc[-1] in WholeJob.model_fields:
        return f"is of the whole job; set resources.{loc[-1]}"
    if loc[0] == "resources" and loc[-1] in Resources.model_fields:
        return f"is of one component; set actor.resources.{loc[-1]}, or that of another one"
    if here := answer_to(loc, value):
        return f"unknown key; {here}"
    if loc[0] == "algorithm" and len(loc) > 2:
        return f"unknown key; {unknown_setting(tree['algorithm'], str(loc[1]), str(loc[-1]))}"
    return f"unknown key{_nearest(loc, kind)}"


def _section(loc: tuple[int | str, ...], kind: type[JobConfig]) -> type[BaseModel]:
    section: type[BaseModel] = kind
    path = iter(loc)
    for part in path:
        annotation = section.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:  # tables by name: [eval.NAME]
            next(path)
            annotation = get_args(annotation)[1]
        kinds = (annotation, *get_args(annotation))  # of `Section | None`
        section = next(k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return section


def _nearest(loc: tuple[int | str, ...], kind: type[JobConfig]) -> str:
    section = _section(loc[:-1], kind)
    prefix = "".join(f"{part}." for part in loc[:-1])
    known = list(section.model_fields)
    if section is RunConfig:
        known.append("sft")
    same = [key.name for key in keys_of(kind) if key.name.endswith(f".{loc[-1]}")]
    near = [key for key in same if key.startswith(f"{loc[0]}.")]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    if close and not near:
        return f"; did you mean {prefix}{close[0]}?"
    if 1 <= len(near or same) <= _FEW:
        return f"; here it is {' or '.join(near or same)}"
    return f"; {prefix.rstrip('.') or 'a job'} takes {', '.join(known)}"
