"""Rules of the package as a whole: no circles, small loops, and whom it knows."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.table import PARTS
from relax_hpc.config.keys import TOLD_ONCE, keys_of
from relax_hpc.config.model import Layout
from relax_hpc.config.run import RunConfig

PACKAGE = Path(__file__).parents[2] / "relax_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_ALGORITHM_KEYS = 29  # two of them of distillation
MOST_LINES_OF_A_LOOP = 40
MOST_KEYS, MOST_ADVANCED_KEYS = 110, 44
"""Raised only with a line in CHANGELOG that says why."""


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imported(tree, modules):
    """Modules of the package that a file imports, wherever in it; for types only does not count."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (each.name for each in tree.names if each.name in modules)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        for each in tree.names:
            name = f"{tree.module}.{each.name}"
            name = name if name in modules else tree.module
            yield from [name] if name in modules else []
    for child in ast.iter_child_nodes(tree):
        yield from imported(child, modules)


def circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_file_imports_itself_by_way_of_others(trees):
    modules = {module_of(path) for path in FILES}
    graph = {module_of(path): set(imported(tree, modules)) for path, tree in trees.items()}
    assert sum(map(len, graph.values())) > 1000, "it does look"
    assert circle(graph) == []


def lines_of(function):
    """Counts the lines of a body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1


def test_every_loop_of_a_role_fits_on_a_screen(trees):
    loops = {
        path: [each for each in ast.walk(tree) if getattr(each, "name", "") in ("run", "main")]
        for path, tree in trees.items()
        if path.match("roles/*/loop.py")
    }
    assert len(loops) >= 4 and all(loops.values())
    found = {path: lines_of(run) for path, runs in loops.items() for run in runs}
    assert {path: count for path, count in found.items() if count > MOST_LINES_OF_A_LOOP} == {}


def test_the_rooms_in_the_docs_are_those_whose_imports_are_checked():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [layer.replace("relax_hpc.", "") for layer in layers]
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text()
    drawn = page.partition("## Rooms")[2].split("```")[1].strip().splitlines()
    assert [line.split("  ")[0] for line in drawn] == rooms


def counted_keys(job):
    """Names of the keys of a job: without what is advanced, resources, tables that are passed
    through or told elsewhere and parts of an algorithm, and with what a layout holds once."""
    return [name for name in _names(job) if not _is_advanced(name)]


def _is_advanced(name):
    return "advanced" in name.split(".")[1:-1]


def _names(job):
    names = []
    for key in keys_of(job):
        is_told = key.name.endswith(".columns") and key.name != "prompts.columns"
        is_table = key.type == "table" and (key.default == "{}" or is_told)
        of_part = key.name.startswith("algorithm.") and key.name.count(".") > 1
        if not (is_table or of_part) and not TOLD_ONCE.keys() & key.name.split("."):
            names.append(key.name)
    return names + [f"<component>.layout.{key.name}" for key in keys_of(Layout)]


def test_a_job_of_reinforcement_learning_has_few_keys():
    names = counted_keys(RunConfig)
    assert len(names) == len(set(names)) <= MOST_KEYS, names
    assert {"seed", "actor.optimizer.lr", "eval.<name>.path"} < set(names)  # at every depth
    rest = set(_names(RunConfig)) - set(names)
    assert len(rest) <= MOST_ADVANCED_KEYS, rest
    assert {"launch.advanced.share", "engines.<name>.advanced.drain_slow"} < rest


def test_the_algorithm_of_any_job_has_few_keys():
    of_its_own = len(Algorithm.model_fields) - len(PARTS)
    most = of_its_own + sum(max(len(p.model_fields) for p in parts) for parts in PARTS.values())
    assert 10 < most <= MOST_ALGORITHM_KEYS


MOST_FILES, MOST_NAMES = 430, 16
"""Raised only with a line in CHANGELOG that says why."""
MOST_WORDS_OF_A_PAGE, MOST_WORDS = 3500, 36_000
MADE = {"cli.md", "columns.md", "config.md", "events.md", "run-directory.md"}
"""Pages that `make docs` makes of the code."""


def test_the_house_is_small_and_each_name_at_its_top_is_said():
    names = {path.stem for path in PACKAGE.iterdir()} - {
        "__init__",
        "__main__",
        "__pycache__",
        "py",
    }
    assert len(names) <= MOST_NAMES and len(FILES) <= MOST_FILES
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text()
    drawn = page.partition("## Rooms")[2].split("```")[1].strip().splitlines()
    assert {line.split()[0] for line in drawn} == names and all(len(x.split()) > 3 for x in drawn)


def test_pages_by_hand_are_short():
    pages = [p for p in (PACKAGE.parent / "docs").rglob("*.md") if p.name not in MADE]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert {name: n for name, n in words.items() if n > MOST_WORDS_OF_A_PAGE} == {}
    assert 10_000 < sum(words.values()) <= MOST_WORDS
