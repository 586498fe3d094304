"""Words of the package: what a docstring may open on, and a name that says nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "relax_hpc").rglob("*.py"))
PRONOUNS = {"What", "Of", "Those", "That", "It", "Its", "Their", "They"}
"""Openings after which the reader does not know yet what the thing is."""


def openings(tree):
    """Lines of docstrings, also of fields and constants, that open on one of `PRONOUNS`."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.split()[:1]:
                if text.split()[0].strip(",:;") in PRONOUNS:
                    yield node.lineno


def nameless(tree):
    """Lines on which a variable or a parameter is called `its`, or begins with it."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                if name == "its" or name.startswith("its_"):
                    yield node.lineno


def found_in(path):
    tree = ast.parse(path.read_text())
    return [f"{path.relative_to(ROOT)}:{n}" for n in sorted({*openings(tree), *nameless(tree)})]


def test_docstrings_say_what_a_thing_is_or_does_and_nothing_is_called_its():
    assert len(FILES) > 200, "it does look"
    assert [line for path in FILES for line in found_in(path)] == []
