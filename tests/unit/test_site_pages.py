"""The site: each page is in its navigation once, and it loads nothing from elsewhere."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(nav):
    """The pages of a part of the navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def faults(nav, there):
    """Pages that are missing in the navigation, in it twice, or in it and not there."""
    named = Counter(pages_of(nav))
    return {page: named[page] for page in {*named, *there} if named[page] != (page in there)}


def test_each_page_is_in_the_navigation_once_and_each_of_the_navigation_is_there():
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert len(there) > 20
    assert faults(SITE["nav"], there) == {}


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


@pytest.mark.parametrize(
    ("link", "without", "published"),
    [
        ("[a](b.md#c)", "[a](b.md#c)", "[a](b.md#c)"),
        ("[a](../explanation/b.md)", "[a](../explanation/b.md)", "[a](../explanation/b.md)"),
        ("![a](../images/b.png)", "![a](../images/b.png)", "![a](../images/b.png)"),
        ("[a](../../README.md#c)", "[a](../index.md)", "[a](../index.md)"),
        (
            '[1](../../tests/b.py "c") x',
            '<span title="tests/b.py: c">1</span> x',
            "[1](https://host/us/blob/HEAD/tests/b.py) x",
        ),
    ],
)
def test_links_out_of_the_docs_are_words_or_lead_into_the_repository(
    hook, link, without, published
):
    assert hook.without_links_out(link, "how-to/page.md", "") == without
    assert hook.without_links_out(link, "how-to/page.md", "https://host/us/") == published
