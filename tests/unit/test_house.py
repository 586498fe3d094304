"""Rules of the code as a whole: no circles of imports, small loops, one name for one class."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "relax_hpc"
MOST_LINES_OF_A_LOOP = 40


@pytest.fixture(scope="module")
def trees():
    files = sorted(PACKAGE.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


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


def test_no_file_imports_itself_by_way_of_others(trees):
    modules = set(map(module_of, trees))
    graph = {module_of(path): set(imported(tree, modules)) for path, tree in trees.items()}
    assert sum(map(len, graph.values())) > 1000, "it does look"
    TopologicalSorter(graph).prepare()  # names the circle in its error


def test_every_loop_of_a_role_fits_on_a_screen(trees):
    found = {}
    for path, tree in trees.items():
        for each in ast.walk(tree) if path.match("roles/*/loop.py") else ():
            if getattr(each, "name", "") in ("run", "main"):
                body = each.body[1:] if ast.get_docstring(each) else each.body
                found[path, each.name] = body[-1].end_lineno - body[0].lineno + 1
    assert len(found) >= 4
    assert {path: count for path, count in found.items() if count > MOST_LINES_OF_A_LOOP} == {}


def test_no_two_classes_have_one_name(trees):
    classes = (each for tree in trees.values() for each in ast.walk(tree)
               if isinstance(each, ast.ClassDef) and not each.name.startswith("_"))  # fmt: skip
    names = Counter(each.name for each in classes)
    assert len(names) > 500 and [name for name, count in names.items() if count > 1] == []
