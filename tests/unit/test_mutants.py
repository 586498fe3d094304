"""The lists of `make mutants` fit the tree that they are to be planted in."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "mutants"
sys.path.append(str(FOLDER))
RUN = runpy.run_path(str(FOLDER / "run.py"))
planting = sys.modules["planting"]
MUTANTS = planting.load()
TREE = planting.Tree(ROOT)
AREAS = sorted({mutant.area for mutant in MUTANTS})


@pytest.mark.parametrize("area", AREAS)
def test_every_mistake_can_be_planted_where_its_list_says(area):
    for mutant in (mutant for mutant in MUTANTS if mutant.area == area):
        planted = TREE.planting(mutant)
        assert planted.text != TREE.text(planted.path), f"{area}.toml: {mutant.name}: no mistake"
        is_code = planted.path.suffix != ".py" or planting.is_code(planted.definition)
        assert is_code, f"{area}.toml: {mutant.name}: no Python"


PLACED = '''
class Producer:
    """Puts a row."""

    def put(self, row: Row) -> None:
        """Puts a row."""
        # put(row) flushes
        left = write(
            self.fd,
            row,  # all of it
        )
        if left:
            flush(self.fd)


LIMIT = 3
'''


@pytest.fixture
def plant(tmp_path):
    """Plants a mistake in the module above; returns what is new in it."""
    (tmp_path / "relax_hpc" / "bus").mkdir(parents=True)
    (tmp_path / "relax_hpc" / "bus" / "log.py").write_text(PLACED, encoding="utf-8")

    def plant(where, old, new):
        mutant = planting.Mutant("bus", [], "a name", where, old, new)
        text = planting.Tree(tmp_path).planting(mutant).text
        before = PLACED.splitlines()
        return [line for line in text.splitlines() if line not in before]

    return plant


def test_wraps_comments_and_docstrings_do_not_count(plant):
    put = "bus: Producer.put"
    assert plant(put, "write(self.fd, row)", "0") == ["        left = 0"]
    assert plant(put, "row)", "1)")[-1:] == ["            1)"]
    assert plant("bus/log: LIMIT", "3", "4") == ["LIMIT = 4"]


def test_a_lonely_statement_leaves_pass_and_further_lines_are_indented_as_the_first(plant):
    put = "bus: Producer.put"
    assert plant(put, "flush(self.fd)", "") == ["            pass"]
    assert plant(put, "if left: flush(self.fd)", "") == ["        "]
    assert plant(put, "flush(self.fd)", "while 1:\n    left") == [
        "            while 1:",
        "                left",
    ]


@pytest.mark.parametrize("old", ["self.fd", "lef", "Puts a row", "put(row)"])
def test_what_is_not_there_once_is_not_planted(plant, old):
    with pytest.raises(LookupError, match=r"bus.toml: a name: '.*' is \d times in bus: Prod"):
        plant("bus: Producer.put", old, "")


def test_every_test_that_is_to_notice_a_mistake_exists():
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        found = re.search(rf"^def {re.escape(name)}\b", (ROOT / file).read_text(), re.MULTILINE)
        assert found or not name, test


def test_every_mistake_has_a_name_of_its_own_and_a_test():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert all(mutant.tests for mutant in MUTANTS)


def test_links_to_folders_are_there_where_mistakes_are_planted():
    assert {"relax_hpc/config/jobs", "relax_hpc/launch/sites"} < set(RUN["_files"]())
