"""The lists of `make mutants` fit the tree that they are to be planted in."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = runpy.run_path(str(ROOT / "tests" / "mutants" / "run.py"))
MUTANTS = RUN["load"]()
FILES = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", FILES)
def test_every_mistake_can_be_planted_where_its_list_says(file):
    text = (ROOT / file).read_text()
    for mutant in (mutant for mutant in MUTANTS if mutant.file == file):
        found = text.count(mutant.old)
        assert found == 1, f"{mutant.area}.toml: {mutant.name}: {found} times in {file}"
        assert mutant.old != mutant.new, f"{mutant.area}.toml: {mutant.name}: no mistake"
        if file.endswith(".py"):
            compile(text.replace(mutant.old, mutant.new), file, "exec")


def test_every_test_that_is_to_notice_a_mistake_exists():
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        found = re.search(rf"^def {re.escape(name)}\b", (ROOT / file).read_text(), re.MULTILINE)
        assert found or not name, test


def test_the_lists_are_long_and_a_third_of_them_is_about_the_roles():
    roles = sum(mutant.file.startswith("relax_hpc/roles/") for mutant in MUTANTS)
    assert len(MUTANTS) >= 300 and roles >= 100


def test_every_mistake_has_a_name_of_its_own_and_a_test():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert all(mutant.tests for mutant in MUTANTS)


def test_links_to_folders_are_there_where_mistakes_are_planted():
    assert {"relax_hpc/profiles", "relax_hpc/jobs"} < set(RUN["_files"]())
