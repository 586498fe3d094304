"""Data that a program of the user's makes."""

from pathlib import Path

import pytest

from relax_hpc import user_programs
from relax_hpc.errors import ConfigError
from relax_hpc.prompts import files

PROGRAM = """
import time
class Squares:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        if index == 7:
            raise OSError("no such disk")
        return index if index == 8 else {"prompt": f"{index}*{index}=", "answer": str(index**2)}

class Endless:
    pass

class Slow:
    def __init__(self):
        self.slow = ""

    def __len__(self):
        return time.sleep(self.slow == "len" and 5) or 3

    def __getitem__(self, index):
        time.sleep(self.slow == "row" and 5)
        return {"prompt": "1"}

def slow_length():
    slow = Slow()
    slow.slow = "len"
    return slow

def slow_row():
    slow = Slow()
    slow.slow = "row"
    return slow
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


def test_a_length_or_a_first_row_that_takes_too_long_is_ended(program, monkeypatch):
    monkeypatch.setattr(user_programs, "PATIENCE_S", 0.2)
    monkeypatch.setattr(user_programs, "_TELL_S", 0.1)
    said = r"cannot be made: TimeoutError: making it takes longer than 0\.2 s \(mine\.py:%d\)"
    with pytest.raises(ConfigError, match=r"mine\.py:slow_length: " + said % 20):
        files.open_rows(Path(f"{program}:slow_length"))
    rows = files.open_rows(Path(f"{program}:slow_row"))
    with pytest.raises(ConfigError, match=r"mine\.py:slow_row, row 2: " + said % 23):
        rows[2]
