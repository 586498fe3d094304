"""Reads the lists of mistakes that lie beside this file; plants a mistake in a tree.

A list is a TOML file per area. A key names tests below tests/; its rows are the mistakes that these
tests must notice: what is wrong then (a unique name), where, the old code, and the new code.

    "unit/test_a.py bus/test_b.py::test_one ::test_two" = [
      ["a record is never flushed", "bus: Producer.put", "os.fsync(fd)", ""],
      ["a run has a step more", "roles/actor: run", "step <", "step <=", "why no test notices it"],
    ]

* Where: a folder or module below relax_hpc, then a function, method, class or variable in it. The
  shortest folder will do in which the name is unique. A path with a suffix is a whole file.
* The old code must be there once, as whole words. Line breaks, indents, comments, docstrings and
  trailing commas do not matter; a semicolon may end a statement. So you can move or wrap code.
* The new code takes the place of the old; further lines are indented as the first. If the new code
  is empty, the old is deleted, and `pass` takes its place where a statement has to be.
* A fifth item says why no test notices the mistake.
"""

import ast
import dataclasses
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

Span = tuple[int, int]
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Mutant:
    area: str
    tests: list[str]
    name: str
    where: str
    old: str
    new: str
    survives: str = ""


@dataclasses.dataclass(frozen=True)
class Planting:
    """A file with a mistake in it."""

    path: Path
    text: str
    definition: str
    """The part of the text in which the mistake is, from the beginning of a line."""


def load() -> list[Mutant]:
    """Reads all mistakes, area by area."""
    return [
        Mutant(path.stem, _tests(tests), *row)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for tests, rows in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for row in rows
    ]


def _tests(names: str) -> list[str]:
    """Lists the ids for pytest; one that begins with `::` is in the file of the one before."""
    tests: list[str] = []
    for name in names.split():
        file = tests[-1].partition("::")[0] if name.startswith("::") else "tests/"
        tests.append(file + name)
    return tests


class Module:
    """A file's text; if it is Python, with the definitions in it by qualified name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = path.read_text(encoding="utf-8")

    def may_define(self, name: str) -> bool:
        """Whether it is worth parsing the text to find a definition."""
        name = name.rpartition(".")[2]
        begun = (f"def {name}(", f"class {name}", f"{name} =", f"{name}, ", f"{name}: ")
        return any(text in self.text for text in begun)

    @functools.cached_property
    def definitions(self) -> dict[str, list[Span]]:
        return self._parsed[0]

    @functools.cached_property
    def code(self) -> str:
        """The text with blanks in place of comments and docstrings."""
        code = re.sub(r"(?m)(?:^|(?<=\s))#.*$", _blank, self.text)
        for start, end in self._parsed[1]:
            code = code[:start] + re.sub(r"\S", " ", code[start:end]) + code[end:]
        return code

    @functools.cached_property
    def _parsed(self) -> tuple[dict[str, list[Span]], list[Span]]:
        """Finds the definitions and the docstrings."""
        definitions: dict[str, list[Span]] = {}
        docstrings: list[Span] = []
        if self._path.suffix == ".py":
            for name, node in _definitions(ast.parse(self.text).body):
                definitions.setdefault(name, []).append(self._span(node))
                if isinstance(node, _NAMED) and ast.get_docstring(node, clean=False) is not None:
                    docstrings.append(self._span(node.body[0]))
        return definitions, docstrings

    def _span(self, node: ast.stmt) -> Span:
        """Finds where a statement begins, with its decorators, and where it ends."""
        first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(first, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        """Finds the character of a column, which Python counts in bytes."""
        text, start = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return start + column

    @functools.cached_property
    def _lines(self) -> list[tuple[str, int]]:
        """The lines, and where each begins."""
        lines = self.text.split("\n")
        starts = itertools.accumulate((len(line) + 1 for line in lines), initial=0)
        return list(zip(lines, starts, strict=False))


def _definitions(body: Iterable[ast.AST], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node
            case ast.ClassDef():
                yield prefix + node.name, node
                yield from _definitions(node.body, f"{prefix}{node.name}.")
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for part in itertools.chain.from_iterable(map(ast.walk, targets)):
                    if isinstance(part, ast.Name):
                        yield prefix + part.id, node
            case ast.If() | ast.Try() | ast.ExceptHandler():
                yield from _definitions(ast.iter_child_nodes(node), prefix)


class Tree:
    """Plants mistakes in a tree; reads each of its modules once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._module = functools.cache(Module)
        self._files = functools.cache(self._files_below)
        self._definitions = functools.cache(self._find)

    def text(self, path: Path) -> str:
        return self._module(path).text

    def planting(self, mutant: Mutant) -> Planting:
        places = self.places(mutant.where, mutant.old)
        if len(places) != 1:
            found = f"{mutant.old!r} is {len(places)} times in {mutant.where}"
            raise LookupError(f"{mutant.area}.toml: {mutant.name}: {found}")
        [(path, (first, last), (start, end))] = places
        text = self.text(path)
        line = text[text.rfind("\n", 0, start) + 1 : start]
        new = mutant.new.replace("\n", "\n" + line[: len(line) - len(line.lstrip())])
        first = text.rfind("\n", 0, first) + 1
        if not (new or line.strip() or is_code(text[first:start] + text[end:last])):
            new = "pass"
        definition = text[first:start] + new + text[end:last]
        return Planting(path, text[:first] + definition + text[last:], definition)

    def places(self, where: str, old: str) -> list[tuple[Path, Span, Span]]:
        """Finds the code: in which file, and where the definition and the code are in it."""
        return [
            (path, span, found.span())
            for path, span in self._definitions(where)
            for found in _pattern(old).finditer(self._module(path).code, *span)
        ]

    def _find(self, where: str) -> list[tuple[Path, Span]]:
        scope, _, name = where.partition(": ")
        if not name:
            path = self._root / where
            return [(path, (0, len(self.text(path))))]
        return [
            (path, span)
            for path in self._files(scope)
            if self._module(path).may_define(name)
            for span in self._module(path).definitions.get(name, [])
        ]

    def _files_below(self, scope: str) -> list[Path]:
        place = self._root / "relax_hpc" / scope
        return sorted(place.rglob("*.py")) or [place.with_suffix(".py")]


def is_code(text: str) -> bool:
    """Whether the text of a definition can be compiled."""
    try:
        compile("if True:\n" * text.startswith(" ") + text, "a definition", "exec")
    except SyntaxError:
        return False
    return True


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


@functools.cache
def _pattern(old: str) -> re.Pattern[str]:
    """Matches the code, however it is wrapped."""
    parts = re.findall(r"\w+|[^\w\s]", re.sub(r",(\s*[)\]}])", r"\1", old))
    made = [r"\b" if re.match(r"\w", parts[0]) else ""]
    for before, part in itertools.pairwise(["", *parts]):
        if before:
            made.append(r"\s+" if re.fullmatch(r"\w+", before + part) else r"\s*")
            if part in ")]}" and before not in "([{":
                made.append(r"(?:,\s*)?")
        made.append(";?" if part == ";" else re.escape(part))
    return re.compile("".join([*made, r"\b" if re.match(r"\w", parts[-1]) else ""]))
