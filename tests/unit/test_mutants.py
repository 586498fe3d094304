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


def test_every_mistake_has_a_name_of_its_own_and_tests_that_exist():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) and all(mutant.tests for mutant in MUTANTS)
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        found = re.search(rf"^def {re.escape(name)}\b", (ROOT / file).read_text(), re.MULTILINE)
        assert found or not name, test


def test_links_to_folders_are_there_where_mistakes_are_planted():
    assert {"relax_hpc/config/jobs", "relax_hpc/launch/sites"} < set(RUN["_files"]())
