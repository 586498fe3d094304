"""Pages of the site are in its navigation and load nothing; tested versions are listed."""

import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(nav):
    """The pages of a part of the navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_each_page_is_in_the_navigation_once_and_each_of_the_navigation_is_there():
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    named = Counter(pages_of(SITE["nav"]))
    assert len(there) > 20 and named == Counter(there)


def test_the_site_needs_no_other_host_and_no_server():
    assert SITE["theme"]["font"] is False and "offline" in SITE["plugins"]
    # The plugin asks another host for such a script unless one of that name is here.
    [script] = SITE["extra"]["polyfills"]
    assert "iframe-worker" in script and (DOCS / script).is_file()
    assert SITE["strict"] is True


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("hook", ROOT / SITE["hooks"][0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("link", "without", "published"), [
    ("[a](b.md#c)", "[a](b.md#c)", "[a](b.md#c)"),
    ("![a](../images/b.png)", "![a](../images/b.png)", "![a](../images/b.png)"),
    ("[a](../../README.md#c)", "[a](../index.md)", "[a](../index.md)"),
    ('[1](../../tests/b.py "c") x', '<span title="tests/b.py: c">1</span> x',
     "[1](https://host/us/blob/HEAD/tests/b.py) x"),
])  # fmt: skip
def test_links_out_of_the_docs_are_words_or_lead_to_the_repository(hook, link, without, published):
    assert hook.without_links_out(link, "how-to/page.md", "") == without
    assert hook.without_links_out(link, "how-to/page.md", "https://host/us/") == published


"""Openings after which the reader does not know yet what the thing is."""


NOT_HERE = {"sglang", "nvidia-cudnn-frontend", "relax-hpc"} | {
    "mlflow-skinny", "sqlalchemy", "alembic",
}  # fmt: skip
"""Packages of machines with GPUs and of MLflow, and ours."""


def test_each_package_that_is_asked_for_has_a_tested_version_that_meets_what_is_asked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(each for extra in extras for each in extra)]
    lines = (ROOT / "slurm" / "tested.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line[0] != "#")
    tested = {re.sub(r"[-_.]+", "-", name): version for name, version in tested.items()}
    for requirement in map(Requirement, asked):
        name = re.sub(r"[-_.]+", "-", requirement.name.lower())
        if name not in NOT_HERE:
            assert tested[name] in requirement.specifier, requirement
    script = (ROOT / "slurm" / "install_env.sh").read_text(encoding="utf-8")
    assert f"torch={tested['torch']}\n" in script
