"""README and docs/ are true and short: links, commands, settings and events exist; few keys."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import typer.main

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.table import PARTS
from relax_hpc.cli.keys import all_keys
from relax_hpc.cli.main import app
from relax_hpc.config.keys import TOLD_ONCE, keys_of
from relax_hpc.config.model import Layout
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.runtime.telemetry.event_table import EVENTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_BY_NAME = {page.name: page for page in PAGES}
PAGES_MADE = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))["PAGES"]
COMMANDS = typer.main.get_command(app).commands
OURS = ("jobs", "slurm", "docs", "relax_hpc", "tests")

FILES = ("json", "jsonl", "toml", "py", "md", "png", "log", "h5", "safetensors")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link} has no such heading"


def code(page):
    """Code blocks and code spans of a page, a line each."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", prose)])


@each_page
def test_every_command_is_one_of_ours_and_takes_the_options_shown(page):
    command = r"^ *relax-hpc +([a-z][a-z-]*)([^\n#]*)"
    for verb, rest in re.findall(command, code(page), re.MULTILINE):
        assert verb in COMMANDS, f"{page.name}: relax-hpc {verb}"
        asked = COMMANDS[verb]
        if inner := getattr(asked, "commands", None):  # bus ls, bench shard
            assert rest.split()[0] in inner, f"{page.name}: relax-hpc {verb}{rest}"
            asked = inner[rest.split()[0]]
        known = {option for parameter in asked.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z0-9-]*", rest)) <= known, (
            f"{page.name}: relax-hpc {verb}{rest}"
        )


@each_page
def test_every_path_in_backticks_exists(page):
    for path in re.findall(rf"`((?:{'|'.join(OURS)})/[^`\s]*)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


@each_page
def test_every_dotted_name_is_a_setting_or_in_the_code(page):
    tables = RunConfig.model_fields | SftRunConfig.model_fields
    rooms = [path.stem for path in (ROOT / "relax_hpc").iterdir()] + list(tables)
    for name in re.findall(r"`(\w+(?:\.\w+)+)(?: = [^`]*)?`", page.read_text()):
        first, last = name.split(".")[0], name.split(".")[-1]
        if first in rooms and last not in FILES:
            assert is_setting(name) or is_in_the_code(name), f"{page.name}: {name}"


def is_setting(name):
    """Whether it is a key or a table, or in one whose keys others check."""
    name = re.sub(r"^engines\.\w+\.resources", "<component>.resources", name)
    keys = (zip(key.name.split("."), name.split("."), strict=False) for key in all_keys())
    return any(all(key in (part, "<name>", "<component>") for key, part in pairs) for pairs in keys)


def is_in_the_code(name):
    """Whether `name` is a module below relax_hpc, or defined in one: class, method, function."""
    path, rest = ROOT / "relax_hpc", name.split(".")
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if not rest:
        return True
    module, *parts = rest
    if not (path / f"{module}.py").is_file():
        return False
    text = (path / f"{module}.py").read_text()
    return all(re.search(rf"^ *(?:def|class) {p}\b|^{p}\b.*=", text, re.M) for p in parts)


def test_the_table_of_events_names_what_the_code_emits_and_nothing_else():
    sources = "".join(path.read_text() for path in (ROOT / "relax_hpc").rglob("*.py"))
    assert set(re.findall(r'\.emit\(\s*"(\w+)"', sources)) == EVENTS.keys()


@pytest.mark.parametrize("name", PAGES_MADE)
def test_pages_that_are_made_of_the_code_are_those_of_today(name):
    assert PAGES_BY_NAME[name].read_text() == PAGES_MADE[name](), "run `make docs`"


def test_each_test_that_the_page_on_security_names_is_there():
    named = re.findall(
        r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "explanation" / "security.md").read_text()
    )
    assert len(named) > 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


FAILURES = tomllib.loads(Path(__file__).with_name("failures_page.toml").read_text())
"""Heading -> first cell of a row of the table below it -> "file below tests/::function" of each."""


@pytest.mark.parametrize("heading", ["When something dies", "Hangs"])
def test_every_end_that_the_page_on_failures_promises_to_survive_has_a_test(heading):
    page = PAGES_BY_NAME["failures.md"].read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)[1:]
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`|\*\*", r"\1", cell) for cell in cells]
    assert plain == list(FAILURES[heading])
    assert all(FAILURES[heading].values())
    for each in {each for named in FAILURES[heading].values() for each in named}:
        file, _, test = each.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), each


PACKAGE = ROOT / "relax_hpc"
MOST_ALGORITHM_KEYS = 29  # two of them of distillation
MOST_KEYS, MOST_ADVANCED_KEYS = 110, 47
MOST_FILES, MOST_NAMES = 440, 16
"""Raised only with a line in CHANGELOG that says why."""
MOST_WORDS_OF_A_PAGE, MOST_WORDS = 3500, 36_000


def names_of_keys(job):
    """Without resources, tables that are passed through or told elsewhere and parts of an
    algorithm, and with what a layout holds once."""
    for key in keys_of(job):
        is_told = key.name.endswith(".columns") and key.name != "prompts.columns"
        is_table = key.type == "table" and (key.default == "{}" or is_told)
        of_part = key.name.startswith("algorithm.") and key.name.count(".") > 1
        if not (is_table or of_part) and not TOLD_ONCE.keys() & key.name.split("."):
            yield key.name
    yield from (f"<component>.layout.{key.name}" for key in keys_of(Layout))


def test_a_job_of_reinforcement_learning_has_few_keys():
    names = [*names_of_keys(RunConfig)]
    rest = {name for name in names if "advanced" in name.split(".")[1:-1]}
    assert {"launch.advanced.share", "engines.<name>.advanced.drain_slow"} < rest
    assert {"seed", "actor.optimizer.lr", "eval.<name>.path"} < {*names} - rest  # at every depth
    assert len({*names} - rest) <= MOST_KEYS and len(rest) <= MOST_ADVANCED_KEYS, names


def test_the_algorithm_of_any_job_has_few_keys():
    of_its_own = len(Algorithm.model_fields) - len(PARTS)
    most = of_its_own + sum(max(len(p.model_fields) for p in parts) for parts in PARTS.values())
    assert 10 < most <= MOST_ALGORITHM_KEYS


def test_the_package_is_small_and_each_name_at_its_top_is_said():
    of_python = {"__init__", "__main__", "__pycache__", "py"}
    names = {path.stem for path in PACKAGE.iterdir()} - of_python
    assert len(names) <= MOST_NAMES and len([*PACKAGE.rglob("*.py")]) <= MOST_FILES
    page = PAGES_BY_NAME["architecture.md"].read_text()
    drawn = page.partition("## Rooms")[2].split("```")[1].strip().splitlines()
    assert {line.split()[0] for line in drawn} == names and all(len(x.split()) > 3 for x in drawn)


def test_pages_by_hand_are_short():
    pages = [page for page in PAGES[1:] if page.name not in PAGES_MADE]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert {name: n for name, n in words.items() if n > MOST_WORDS_OF_A_PAGE} == {}
    assert 10_000 < sum(words.values()) <= MOST_WORDS
