"""What `make site` does to pages, which are written for whoever reads them in the repository."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"""(?<!!)\[([^\]\n]+)\]\((\.\./[^)\s]+)(?:\s+"([^"]*)")?\)""")


def on_config(config: Any) -> Any:  # noqa: ANN401
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, _separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:  # noqa: ANN401
    return without_links_out(markdown, page.file.src_uri, config.repo_url or "")


def without_links_out(markdown: str, page: str, repository: str) -> str:
    """Links that lead out of docs/ lead into the repository, if it is published; else they are
    words, and their path is shown when one points at them. README is the site's first page.

    Args:
        page: its path below docs/.
    """
    folder = posixpath.dirname(page)

    def replaced(link: re.Match[str]) -> str:
        text, target, title = link.groups()
        path, _, anchor = posixpath.normpath(posixpath.join(folder, target)).partition("#")
        if not path.startswith("../"):
            return link[0]
        path = path.removeprefix("../")
        if path == "README.md":
            return f"[{text}]({posixpath.relpath('index.md', folder or '.')})"
        if repository:
            return (
                f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path}{'#' * bool(anchor)}{anchor})"
            )
        return f'<span title="{path}{": " * bool(title)}{title or ""}">{text}</span>'

    return _LINK.sub(replaced, markdown)
