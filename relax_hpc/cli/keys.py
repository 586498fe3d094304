"""`relax-hpc keys`: lists the keys of a job.

Also `relax-hpc check JOB --explain`: a job's roles, columns and algorithm, each with its reason.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.part import AlgorithmPart, Needs
from relax_hpc.config.keys import TOLD_ONCE, Key, keys_of
from relax_hpc.config.run import JobConfig, RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError, nearest
from relax_hpc.roles.role import Place, Role
from relax_hpc.roles.table import check_columns, places
from relax_hpc.schema import COLUMNS, PRODUCER, ROUTED_EXPERTS
from relax_hpc.sections import SharedResources

_FEW, _MANY = 3, 6
"""Most suggestions for a key's name alone, and for a part of it."""


def matching(section: str) -> list[Key]:
    """Returns the settings at or below `section`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    known = all_keys()
    if TOLD_ONCE.keys() & section.split("."):
        known = list(dict.fromkeys([*known, *_of_components()]))
    found = [key for key in known if f"{key.name}.".startswith(f"{section}." if section else "")]
    if found:
        return found
    names = {name for key in known for name in prefixes(key.name)}
    plain = {key.name: key.name.replace(".advanced.", ".") for key in known}
    same = [key for key, said in plain.items() if f".{said}".endswith(f".{section}")]
    if not 1 <= len(same) <= _FEW:
        close = nearest(section, names)
        same = [] if close else [key.name for key in known if section.lower() in key.name]
    if same:
        more = f" or {len(same) - _MANY} more" * (len(same) > _MANY)
        close = f"did you mean {' or '.join(same[:_MANY])}{more}?"
    raise ConfigError(f"{section}: no key of a job; {close or 'relax-hpc keys lists them all'}")


def explain_section(job: BaseModel, section: str) -> Iterator[str]:
    """Explains the keys at or below `section`, with their values in a job.

    Raises:
        ConfigError: there is no such key.
    """
    for key in matching(section):
        yield from lines_of(key)
        for name, value in _values(job, key.name.split("."), ""):
            yield f"    here: {name} = {json.dumps(value, default=_plain)}"


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _values(node: object, path: Sequence[str], prefix: str) -> Iterator[tuple[str, object]]:
    """Yields the values of a key in a job, one for each user-defined name on the way."""
    if not path:
        yield prefix, node
        return
    first, *rest = path
    found = node if isinstance(node, dict) else dict(node) if isinstance(node, BaseModel) else {}
    for name in found if first.startswith("<") else [first]:
        if name in found:
            yield from _values(found[name], rest, f"{prefix}.{name}" if prefix else name)


def all_keys() -> list[Key]:
    """Lists the keys of reinforcement learning, of supervised fine-tuning, and shared ones once."""
    learning = keys_of(RunConfig)
    names = {key.name for key in learning}
    tuning = [key for key in keys_of(SftRunConfig) if key.name not in names]
    told_once = [
        key._replace(name=f"<component>.{section}.{key.name}")
        for section, holds in TOLD_ONCE.items()
        for key in keys_of(holds)
    ]
    headings = tuple(f".{section}" for section in TOLD_ONCE)
    own = [key for key in [*learning, *tuning] if key.text or not key.name.endswith(headings)]
    return own + told_once


def _of_components() -> Iterator[Key]:
    """Yields the keys of shared sections, under the name of each component."""
    for key in dict.fromkeys([*keys_of(RunConfig), *keys_of(SftRunConfig)]):
        section = key.name.rpartition(".")[2]
        if section in TOLD_ONCE:
            holds = SharedResources if key.name == section else TOLD_ONCE[section]
            yield from (each._replace(name=f"{key.name}.{each.name}") for each in keys_of(holds))


def lines_of(key: Key) -> list[str]:
    """Formats name, default and type in a line, then the text."""
    default = f" = {key.default}" if key.default not in ("", "required") else ""
    required = " (required)" if key.default == "required" else ""
    return [f"{key.name}{default}{required}   [{key.type}]", f"    {key.text}"]


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


MEASURED = "measured, nothing in the loss needs it"


def explain_job(config: JobConfig) -> Iterator[str]:
    """Yields lines on a job's parts, with reasons.

    Raises:
        ConfigError: the algorithm needs a column that nobody in this job writes.
    """
    check_columns(config)
    wanted = config.reasons if isinstance(config, RunConfig) else {}
    yield "roles"
    for role, place in places(config):
        yield f"  {place.component:<20} {place.tasks} x {role.name}: {_why(role, place, wanted)}"
    if not isinstance(config, RunConfig):
        return
    yield "columns"
    for name, column in COLUMNS.items():
        if column.writer == PRODUCER and column.required:
            yield f"  {name:<28} {column.writer}: in every row"
    reasons = {ROUTED_EXPERTS: "routing replay, rollout.advanced.routed_experts", **wanted}
    for name in sorted(config.columns):
        yield f"  {name:<28} {COLUMNS[name].writer}: {reasons.get(name, MEASURED)}"
    if config.rollout.advanced.routed_experts is None and config.rollout_pool.kind == "sglang":
        yield f"  {ROUTED_EXPERTS:<28} rollout: routing replay, for a mixture of experts"
    yield from _algorithm(config.algorithm)


def _why(role: Role[JobConfig], place: Place, wanted: Mapping[str, str]) -> str:
    writer = role.writer_at(place)
    reasons = [key for name, key in wanted.items() if COLUMNS[name].writer == writer]
    beside = f", beside {place.beside}" if place.beside else ""
    if writer and writer != PRODUCER:
        return f"{role.work}: {', '.join(reasons) or MEASURED}{beside}"
    return f"{role.work}{beside}"


def _algorithm(algorithm: Algorithm) -> Iterator[str]:
    yield f"algorithm: preset {algorithm.preset}"
    for name in ("aggregation", "epochs_per_step", "mini_batches"):
        yield f"  {name:<15} {getattr(algorithm, name)}"
    for table, part in algorithm.parts:
        yield f"  {table:<15} {part.name}{_explain_values(part)}"
    yield f"  {'needs':<15} {'; '.join(_needs(algorithm.needs))}"


def _explain_values(part: AlgorithmPart) -> str:
    values = (f"{key} = {json.dumps(value, default=str)}" for key, value in part if key != "name")
    return "".join(f", {value}" for value in values)


def _needs(needs: Needs) -> Iterator[str]:
    yield {"row": "each row for itself", "group": "whole prompt groups", "batch": "whole batches"}[
        needs.scope
    ]
    if needs.min_siblings > 1:
        yield f"rollout.samples_per_prompt >= {needs.min_siblings}"
    if needs.prepass:
        yield "a forward pass over the batch before it is trained on"
    yield "rows without advantage teach, too" if needs.every_row else "rows with an advantage"
