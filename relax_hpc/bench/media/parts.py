"""The parts of `relax-hpc bench media`, and how much each of them takes on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relax_hpc.bench.media import engine, prepare, tower_task, towers
from relax_hpc.bench.report import Row
from relax_hpc.errors import ConfigError

PARTS = ("prepare", "towers", "engine")


class Works(NamedTuple):
    """The work of each part."""

    prepare: prepare.Work
    towers: tower_task.Work
    engine: engine.Work


_TINY = Works(
    prepare.Work(side=256, images=6, repeats=2),
    tower_task.Work(
        large=((4, (256, 256)), (1, (512, 512))), small=(16, (128, 128)), memory=(2, 4),
        memory_size=(256, 256), tower_patches=512, repeats=2,
    ),
    engine.Work(images=3, siblings=4, side=256, repeats=2),
)  # fmt: skip


def works_of(
    shape: str,
    *,
    tower_patches: int | None = None,
    mfu: float = 0.45,
    workers: int | None = None,
    repeats: int | None = None,
) -> Works:
    """Returns what is measured of a shape: of `tiny`, what takes a CPU seconds.

    Args:
        shape: a name, or a model's folder.
        tower_patches: patches that go through the tower at once.
        mfu: share of a GPU's peak that the language model trains at.
        workers: processes that decode; None is one for each core, eight at most.
        repeats: of every measurement; None is what each part has.
    """
    found = _TINY if shape == "tiny" else Works(prepare.Work(), tower_task.Work(), engine.Work())
    tower = found.towers._replace(mfu=mfu)
    if tower_patches is not None:
        tower = tower._replace(tower_patches=tower_patches)
    found = Works(
        found.prepare._replace(workers=workers), tower, found.engine._replace(workers=workers)
    )
    if repeats is None:
        return found
    return Works(
        found.prepare._replace(repeats=repeats),
        found.towers._replace(repeats=repeats),
        found.engine._replace(repeats=repeats),
    )


def measure(
    parts: Sequence[str],
    shape: str,
    works: Works,
    *,
    overrides: Sequence[str] = (),
    python: str | None = None,
) -> Iterator[Row]:
    """Rows as they come.

    Args:
        parts: of `PARTS`; all if none.
        shape: a name of `folder.SHAPES`, or a model's folder.
        works: work of each part.
        overrides: further settings of the job that the engine is of.
        python: interpreter that has SGLang.

    Raises:
        ConfigError: no such part, or as the parts.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--part {part}: is none of {', '.join(PARTS)}")
    chosen = parts or PARTS
    if "prepare" in chosen:
        yield from prepare.measure(shape, works.prepare)
    if "towers" in chosen:
        yield from towers.measure(shape, works.towers)
    if "engine" in chosen:
        yield from engine.measure(shape, works.engine, overrides=overrides, python=python)
