"""A part is a short class in a file of its name, and known to the table."""

import subprocess
import sys
from pathlib import Path

import relax_hpc.algorithms
from relax_hpc.algorithms import table

FOLDERS = {"advantages": "advantage", "losses": "loss", "corrections": "correction"}
ROOT = Path(relax_hpc.algorithms.__file__).parent
FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("[!_]*.py"))]


def test_no_part_is_without_a_file():
    known = [name for part in FOLDERS.values() for name, _ in table.names_of(part)]
    assert sorted(known) == sorted(file.stem for file in FILES)


def test_a_login_node_knows_all_of_them_without_torch():
    program = "import relax_hpc.algorithms.table, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
