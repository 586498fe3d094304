"""Data that a program of the user's makes."""

from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.prompts import files

PROGRAM = """
class Squares:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        if index == 7:
            raise OSError("no such disk")
        return index if index == 8 else {"prompt": f"{index}*{index}=", "answer": str(index**2)}

class Endless:
    pass
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


def test_rows_are_asked_of_it_by_number_and_a_slice_may_stand_behind_it(program):
    rows = files.open_rows(Path(f"{program}:Squares"))
    assert len(rows) == sum(rows.blocks.sizes) == 600
    assert rows[599].fields == {"prompt": "599*599=", "answer": "358801"}
    assert rows.where(12) == f"{program}:Squares, row 12"
    some = files.open_rows(Path(f"{program}:Squares[100:-100]"))
    assert (len(some), some[0].fields["answer"]) == (400, "10000")
    assert files.paths_of(Path(f"{program}:Squares")) == [program], "the file that it depends on"


def test_what_it_does_wrong_is_said_with_its_place(program):
    rows = files.open_rows(Path(f"{program}:Squares"))
    with pytest.raises(ConfigError, match="Squares, row 7: cannot be made: OSError: no such disk"):
        rows[7]
    with pytest.raises(ConfigError, match="Squares, row 8: is 8; return a dict"):
        rows[8]
    with pytest.raises(ConfigError, match=r"mine\.py:Endless: cannot be made: TypeError: .*len"):
        files.open_rows(Path(f"{program}:Endless"))
    with pytest.raises(ConfigError, match=r"mine\.py:None_such: cannot be made: AttributeError"):
        files.open_rows(Path(f"{program}:None_such"))
    with pytest.raises(ConfigError, match=r"gone\.py:Rows: cannot be made: FileNotFoundError"):
        files.open_rows(program.parent / "gone.py:Rows")
