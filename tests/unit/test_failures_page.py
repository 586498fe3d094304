"""Every end that docs/reference/failures.md promises to survive has a test that brings it about."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/failures.md"

TESTS = tomllib.loads(Path(__file__).with_name("failures_page.toml").read_text())
"""Heading -> first cell of a row of the table below it -> "file below tests/::function" of each."""
DONE_BY = {
    "a node, or the batch script with it": '"node lost": 1',
    "a preemption without notice": '["scontrol", "requeue"',
    "scancel of the job or of a component": "CANCELLED",
    "Slurm's controller is away": '"ctld-kill"',
    "an engine has less than half the median speed": "SIGSTOP",
    "a task is stopped (kill -STOP), even while it waits": "SIGSTOP",
}
"""First cell of a row -> what does that in one of its tests, or in a file beside it."""


def rows_below(heading):
    """Cells of the table below a heading, without its head."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def plain(cell):
    """A cell without links, code and emphasis."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("**", "")


def is_there(file, name):
    text = (ROOT / "tests" / file).read_text()
    return bool(re.search(rf"^(async )?def {name}\(", text, re.MULTILINE))


@pytest.mark.parametrize(("heading", "columns"), [("When something dies", 4), ("Hangs", 3)])
def test_every_end_in_the_tables_has_a_test_that_is_there(heading, columns):
    rows = rows_below(heading)
    assert [plain(row[0]) for row in rows] == list(TESTS[heading])
    assert all(len(row) == columns and all(row) for row in rows)
    for ends, named in TESTS[heading].items():
        assert named and all(is_there(*each.split("::")) for each in named), ends


@pytest.mark.parametrize("ends", DONE_BY)
def test_a_test_of_an_end_does_that_to_a_run(ends):
    named = {**TESTS["When something dies"], **TESTS["Hangs"]}[ends]
    files = {ROOT / "tests" / each.partition("::")[0] for each in named}
    beside = {file.with_name(file.name.removeprefix("test_")) for file in files}
    texts = [file.read_text() for file in files | beside if file.exists()]
    assert any(DONE_BY[ends] in text for text in texts)
