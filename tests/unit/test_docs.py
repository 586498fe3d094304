"""README and docs/ are true: links, commands, options, paths, settings and events exist."""

import dataclasses
import functools
import re
import runpy
import tomllib
from pathlib import Path
from typing import get_args, get_origin

import pytest
import typer.main
from typer.testing import CliRunner

from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.table import PARTS
from relax_hpc.cli.keys import all_keys
from relax_hpc.cli.main import app
from relax_hpc.config.job_file import validate
from relax_hpc.config.keys import TOLD_ONCE
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.runtime.telemetry.event_table import EVENTS
from relax_hpc.schema import COLUMN_WRITERS, COLUMNS, ColumnWriter

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
def test_every_make_target_is_in_the_makefile(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^make ([a-z][a-z-]*)", code(page), re.MULTILINE)
    assert set(named) <= targets, page.name


@each_page
def test_every_path_in_backticks_exists(page):
    for path in re.findall(rf"`((?:{'|'.join(OURS)})/[^`\s]*)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


@each_page
def test_every_dotted_name_is_a_setting_or_in_the_code(page):
    rooms = [path.stem for path in (ROOT / "relax_hpc").iterdir()] + list(SETTINGS)
    for name in re.findall(r"`(\w+(?:\.\w+)+)(?: = [^`]*)?`", page.read_text()):
        first, last = name.split(".")[0], name.split(".")[-1]
        if first in rooms and last not in FILES:
            assert is_setting(name) or is_in_the_code(name), f"{page.name}: {name}"


SETTINGS = RunConfig.model_fields | SftRunConfig.model_fields


def is_setting(name):
    fields = SETTINGS
    keys = iter(name.split("."))
    for key in keys:
        if fields is PASSED_THROUGH:
            return key in fields_of_megatron()
        if key not in fields:
            return False
        if fields is Algorithm.model_fields and key in PARTS:
            return any(f"{each.name}.".startswith(f"{name}.") for each in all_keys())
        is_table = get_origin(fields[key].annotation) is dict
        if is_table and key in TABLES_BY_NAME:
            next(keys, None)
            fields = get_args(fields[key].annotation)[1].model_fields
            continue
        kinds = [fields[key].annotation, *get_args(fields[key].annotation)]  # or None
        found = next((k.model_fields for k in kinds if hasattr(k, "model_fields")), {})
        fields = PASSED_THROUGH if is_table else found
    return True


TABLES_BY_NAME = ("engines", "eval")
PASSED_THROUGH = {}
"""The keys of a table that Megatron-core or the engine checks."""


@functools.cache
def fields_of_megatron():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


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


def test_every_key_of_a_job_says_what_it_does():
    tables = set(TOLD_ONCE)
    silent = {key.name for key in all_keys() if not key.text}
    assert {name.rpartition(".")[2] for name in silent} <= tables


def test_roles_in_the_bus_page_are_numbered_as_in_the_code():
    [row] = re.findall(r"^\| 6 \| u16 \| role: (.*) \|$", PAGES_BY_NAME["bus.md"].read_text(), re.M)
    assert row.split(", ") == [f"{number} {role}" for role, number in COLUMN_WRITERS.items()]
    assert set(COLUMN_WRITERS) == set(get_args(ColumnWriter))
    assert set(COLUMN_WRITERS) == {column.writer for column in COLUMNS.values()}
    numbers = COLUMN_WRITERS.values()
    assert len(set(numbers)) == len(numbers) and not {1, 6, 7} & set(numbers)


def test_the_job_in_the_readme_is_one():
    [job] = re.findall(r"^```toml\n(.*?)^```", PAGES[0].read_text(), re.MULTILINE | re.DOTALL)
    config = validate(tomllib.loads(job), source="README.md")
    assert (config.resources.gpu_type, config.actor.layout.world_size) == ("h100", 1)


def test_the_table_of_events_names_what_the_code_emits_and_nothing_else():
    sources = "".join(path.read_text() for path in (ROOT / "relax_hpc").rglob("*.py"))
    assert set(re.findall(r'\.emit\(\s*"(\w+)"', sources)) == EVENTS.keys()


@pytest.mark.parametrize("name", PAGES_MADE)
def test_pages_that_are_made_of_the_code_are_those_of_today(name):
    assert PAGES_BY_NAME[name].read_text() == PAGES_MADE[name](), "run `make docs`"


def test_a_key_is_explained_with_its_value_in_a_job():
    found = CliRunner().invoke(
        app, ["check", "jobs/tiny/arithmetic.toml", "--explain", "actor.optimizer"]
    )
    assert "actor.optimizer.lr = 1e-06   [number]" in found.output
    assert "here: actor.optimizer.lr = 0.0005" in found.output
    assert "Adam's learning rate after the warm-up" in found.output
    assert "actor.advanced.attention" not in found.output


def test_keys_lists_every_setting_and_names_the_nearest():
    listed = CliRunner().invoke(app, ["keys"]).output
    missing = [key.name for key in all_keys() if f"\n{key.name}" not in f"\n{listed}"]
    assert missing == []
    assert {"sft.train", "prompts.train", "<component>.resources.partition"} <= {
        key.name for key in all_keys()
    }
    error = CliRunner().invoke(app, ["keys", "actor.optmizer"]).exception
    assert str(error) == "actor.optmizer: no key of a job; did you mean actor.optimizer?"
    error = CliRunner().invoke(app, ["keys", "lr"]).exception
    assert str(error) == "lr: no key of a job; did you mean actor.optimizer.lr or critic.lr?"


def test_each_test_that_the_page_on_security_names_is_there():
    named = re.findall(
        r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "explanation" / "security.md").read_text()
    )
    assert len(named) > 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
