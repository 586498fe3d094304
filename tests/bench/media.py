"""Images from file to engine and trainer: CPU seconds, towers, requests with images.

python tests/bench/media.py --part towers --part engine --json media.json
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import media_engine
import media_prepare
import media_towers
from rich.console import Console

from relax_hpc.cli.bench.report import ReportRow, machine, show
from relax_hpc.errors import ConfigError, RelaxError, none_of
from relax_hpc.runtime.files.scratch import use_private_folder

PARTS = ("prepare", "towers", "engine")


class Works(NamedTuple):
    """The work of each part."""

    prepare: media_prepare.Work
    towers: media_towers.Work
    engine: media_engine.Work


_TINY = Works(
    media_prepare.Work(side=256, images=6, repeats=2),
    media_towers.Work(
        large=((4, (256, 256)), (1, (512, 512))), small=(16, (128, 128)), memory=(2, 4),
        memory_size=(256, 256), tower_patches=512, repeats=2,
    ),
    media_engine.Work(images=3, siblings=4, side=256, repeats=2),
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
    whole = Works(media_prepare.Work(), media_towers.Work(), media_engine.Work())
    found = _TINY if shape == "tiny" else whole
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
) -> Iterator[ReportRow]:
    """Rows as they come, of these of `PARTS`; of all if none is named."""
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--part {part}: {none_of(part, PARTS)}")
    chosen = parts or PARTS
    if "prepare" in chosen:
        yield from media_prepare.measure(shape, works.prepare)
    if "towers" in chosen:
        yield from media_towers.measure(shape, works.towers)
    if "engine" in chosen:
        yield from media_engine.measure(shape, works.engine, overrides=overrides, python=python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        help="prepare, towers or engine; repeatable; else all",
    )
    parser.add_argument("--shape", default="qwen3-vl-4b", help="a name, or a model's folder")
    parser.add_argument(
        "--tower-patches", type=int, help="patches at once, as actor.advanced.tower_patches"
    )
    parser.add_argument(
        "--mfu", type=float, default=0.45, help="of the language model, for the towers' share"
    )
    parser.add_argument("--workers", type=int, help="processes that decode")
    parser.add_argument("--repeats", type=int, help="of every measurement")
    parser.add_argument("--set", action="append", default=[], help="section.key=value; repeatable")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--python", help="interpreter that has the engine")
    args = parser.parse_args()
    works = works_of(
        args.shape, tower_patches=args.tower_patches, mfu=args.mfu, workers=args.workers,
        repeats=args.repeats,
    )  # fmt: skip
    before, rows = machine(), list[ReportRow]()
    try:
        with use_private_folder(os.environ):  # as a task has it
            rows.extend(
                measure(args.part, args.shape, works, overrides=args.set, python=args.python)
            )
    except RelaxError as error:
        sys.exit(str(error))
    finally:  # what was measured before an error is not lost
        show(rows, Console(soft_wrap=True), args.json, before)


if __name__ == "__main__":
    main()
