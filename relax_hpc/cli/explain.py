"""`relax-hpc check JOB --explain`: the roles and columns of a job, why each is there, and its
algorithm, part by part."""

import json
from collections.abc import Iterator, Mapping

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.part import Needs, Part
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.roles.role import Place, Role
from relax_hpc.roles.table import check_columns, places
from relax_hpc.schema import COLUMNS, PRODUCER, ROUTED_EXPERTS

MEASURED = "measured, nothing in the loss needs it"


def explained_job(config: JobConfig) -> Iterator[str]:
    """Lines about what of a job is there, and why.

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
    reasons = {ROUTED_EXPERTS: "routing replay, rollout.routed_experts", **wanted}
    for name in sorted(config.columns):
        yield f"  {name:<28} {COLUMNS[name].writer}: {reasons.get(name, MEASURED)}"
    if config.rollout.routed_experts is None and config.rollout_pool.kind == "sglang":
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
        yield f"  {table:<15} {part.name}{_values(part)}"
    yield f"  {'needs':<15} {'; '.join(_needs(algorithm.needs))}"


def _values(part: Part) -> str:
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
