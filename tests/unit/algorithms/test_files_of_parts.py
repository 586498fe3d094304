"""A part is a short class in a file of its name, and known to the table."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import relax_hpc.algorithms
from relax_hpc.algorithms import table

FOLDERS = {"advantages": "advantage", "losses": "loss", "corrections": "correction"}
ROOT = Path(relax_hpc.algorithms.__file__).parent
FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("[!_]*.py"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_it_is_in_the_table_by_the_name_of_its_file_and_short(file):
    part = dict(table.names_of(FOLDERS[file.parent.name]))[file.stem]
    assert part.__module__ == f"relax_hpc.algorithms.{file.parent.name}.{file.stem}"
    assert len(inspect.getsource(part).splitlines()) <= 50
    assert part.__doc__


def test_no_part_is_without_a_file():
    known = [name for part in FOLDERS.values() for name, _ in table.names_of(part)]
    assert sorted(known) == sorted(file.stem for file in FILES)


def test_a_login_node_knows_all_of_them_without_torch():
    program = "import relax_hpc.algorithms.table, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
