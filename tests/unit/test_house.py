"""Rules of the package as a whole: no circles, small loops, and whom it knows."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from pydantic import create_model

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.table import PARTS
from relax_hpc.config.keys import TOLD_ONCE, keys_of
from relax_hpc.config.model import Layout
from relax_hpc.config.run import RunConfig
from relax_hpc.sections import PassThrough

PACKAGE = Path(__file__).parents[2] / "relax_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_ALGORITHM_KEYS = 29  # two of them of distillation
MOST_LINES_OF_A_LOOP = 40
MOST_KEYS, MOST_ADVANCED_KEYS = 110, 44
"""Raised only with a line in CHANGELOG that says why."""
SUBMITIT = {"JobEnvironment", "SlurmExecutor"}
"""Names of submitit that we use; docs/explanation/architecture.md says for what."""


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


def test_a_circle_would_be_noticed_even_inside_a_function_but_not_for_types_only():
    modules = {"p", "p.a", "p.b"}
    inside = ast.parse("def f():\n    from p import b")
    types = ast.parse("if TYPE_CHECKING:\n    from p.b import B")
    back = set(imported(ast.parse("from p.a import A"), modules))
    assert circle({"p.a": set(imported(inside, modules)), "p.b": back})
    assert not circle({"p.a": set(imported(types, modules)), "p.b": back})


def texts_without_encoding(tree):
    """Lines that open, read or write text in whatever encoding the locale has; ruff sees those of
    names that it knows as paths, this all."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=args, keywords=keywords):
                said = [*args[name == "fdopen" :], *(k.value for k in keywords if k.arg == "mode")]
                of = ast.unparse(of)
            case ast.Call(func=ast.Name(id="open" as name), args=args, keywords=keywords):
                said, of = args[1:], ""
            case _:
                continue
        named = {keyword.arg for keyword in keywords}
        is_of_ours = of in ("os", "av", "Image") or not all(
            isinstance(s, ast.Constant) for s in said
        )
        is_binary = any("b" in str(mode.value) for mode in said if isinstance(mode, ast.Constant))
        is_text = {
            "read_text": not args,
            "write_text": len(args) == 1,
            "fdopen": not is_binary,
            "open": not is_of_ours and not is_binary,
        } | dict.fromkeys(
            ["run", "Popen", "check_output"], bool({"text", "universal_newlines"} & named)
        )
        if is_text.get(name) and not {"encoding", None} & named:
            yield node.lineno


def test_text_is_read_and_written_as_utf_8_whatever_the_locale(trees):
    found = {str(path): list(texts_without_encoding(tree)) for path, tree in trees.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_text_in_the_encoding_of_the_locale_would_be_noticed():
    lines = [
        "path.read_text()", "path.write_text(text)", "path.open()", "path.open('a')", "open(path)",
        "os.fdopen(fd, 'w')", "subprocess.run(command, text=True)",
    ]  # fmt: skip
    assert list(texts_without_encoding(ast.parse("\n".join(lines)))) == [1, 2, 3, 4, 5, 6, 7]
    fine = [
        "path.read_text(encoding='utf-8')", "path.open('rb')", "os.fdopen(fd, 'wb', 0)",
        "write_text(path, text)", "read_text(path, remedy)", "subprocess.run(command)",
    ]  # fmt: skip
    assert list(texts_without_encoding(ast.parse("\n".join(fine)))) == []


def texts_of_children(tree):
    """Lines that have subprocess decode what a program prints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
            named = {keyword.arg for keyword in node.keywords}
            if named & {"text", "encoding", "errors", "universal_newlines"}:
                yield node.lineno


def test_what_a_program_prints_is_decoded_in_one_place(trees):  # G2, O1
    found = {path.name for path, tree in trees.items() if list(texts_of_children(tree))}
    assert found == {"process.py"}


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


def test_it_would_notice_one_key_more_than_that():
    now = counted_keys(RunConfig)
    more = {f"key_{number}": (int, 1) for number in range(MOST_KEYS + 1 - len(now))}
    section = create_model("Further", layout=(Layout, Layout()), table=(PassThrough, {}), **more)
    longer = create_model("Longer", __base__=RunConfig, further=(section, section()))
    assert set(counted_keys(longer)) - set(now) == {f"further.{name}" for name in more}
    assert len(counted_keys(longer)) == MOST_KEYS + 1
    tucked = create_model("Tucked", advanced=(section, section()), advanced_one=(int, 1))
    beside = create_model("Beside", __base__=RunConfig, further=(tucked, tucked()))
    assert set(counted_keys(beside)) - set(now) == {"further.advanced_one"}
    assert len(_names(beside)) == len(_names(RunConfig)) + len(more) + 1


def of_submitit(tree):
    """Names that a module takes from submitit; one with a dot is of one of its own modules."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if (
                module.split(".")[0] == "submitit"
            ):
                inner = module.removeprefix("submitit").lstrip(".")
                yield from (f"{inner}.{each.name}".lstrip(".") for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] == "submitit")


def test_of_submitit_only_public_names_are_known_and_only_to_the_launcher(trees):
    found = {
        (path.relative_to(PACKAGE).parts[0], name)
        for path, tree in trees.items()
        for name in of_submitit(tree)
    }
    assert found == {("launch", name) for name in SUBMITIT}
    said = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text()
    assert all(f"`submitit.{name}`" in said for name in SUBMITIT)


def test_it_would_notice_a_private_name_of_submitit():
    assert list(of_submitit(ast.parse("from submitit.core.utils import JobPaths"))) == [
        "core.utils.JobPaths"
    ]
    assert list(of_submitit(ast.parse("import submitit.core"))) == ["submitit.core"]


MOST_FILES, MOST_NAMES = 450, 16
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
