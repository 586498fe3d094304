"""Images from file to trainer: CPU seconds, towers.

python tests/bench/media.py --part towers
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import media_prepare
import media_towers
from rich.console import Console

from relax_hpc.cli.bench.report import ReportRow, machine, show
from relax_hpc.errors import RelaxError
from relax_hpc.runtime.files.scratch import use_private_folder

_TINY_TOWERS = media_towers.Work(
    ((4, (256, 256)), (1, (512, 512))), (16, (128, 128)), tower_patches=512, repeats=2
)


def _prepare(args: argparse.Namespace) -> Iterator[ReportRow]:
    work = media_prepare.Work(256, 2) if args.shape == "tiny" else media_prepare.Work()
    return media_prepare.measure(args.shape, work)


def _towers(args: argparse.Namespace) -> Iterator[ReportRow]:
    work = _TINY_TOWERS if args.shape == "tiny" else media_towers.Work()
    return media_towers.measure(args.shape, work)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[ReportRow]]] = {
    "prepare": _prepare,
    "towers": _towers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; else all")
    parser.add_argument("--shape", default="qwen3-vl-4b", help="a name, or a model's folder")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    before, rows = machine(), list[ReportRow]()
    try:
        with use_private_folder(os.environ):  # as a task has it
            for part in args.part or PARTS:
                rows.extend(PARTS[part](args))
    except RelaxError as error:
        sys.exit(str(error))
    finally:  # what was measured before an error is not lost
        show(rows, Console(soft_wrap=True), args.json, before)


if __name__ == "__main__":
    main()
