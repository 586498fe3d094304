"""Lines of logs as people read them: a line per step, and no warnings of libraries."""

import re
from collections.abc import Iterable, Iterator

from relax_hpc.runs.logs import LogLine

_OURS = re.compile(r"\S+ (?P<time>\S+) \S+ \S+ (?P<level>[A-Z]+) relax_hpc[\w.]*: (?P<text>.*)")
_SCRIPTS = re.compile(r"\d{4}-\d\d-\d\dT(?P<time>\d\d:\d\d:\d\d) (?P<text>.*)")
_STEP = re.compile(r"step +\d+/\d+ \|")
_WARNING = re.compile(
    r"(/\S*(-packages|lib/python[\d.]*)/\S+:\d+: \w*Warning: |<frozen [\w.]+>:\d+: \w*Warning: )"
)
_LIBRARY_LOG = re.compile(r"(WARNING|INFO|DEBUG):(?!relax_hpc)[\w.]+:")
_LEAST_FIRST = ("staleness", "epoch", "KL", "MFU", "loss")
"""Parts of a step's line in the order in which a narrow terminal goes without them."""


class Filter:
    """Lines without the warnings of libraries."""

    def __init__(self) -> None:
        self.left_out = 0
        """Warnings that were left out so far."""
        self._inside = set[str]()

    def __call__(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yields those that are none; the indented lines below a warning are part of it."""
        for line in lines:
            if _WARNING.match(line.text) or _LIBRARY_LOG.match(line.text):
                self.left_out += 1
                self._inside.add(line.source)
            elif line.source in self._inside and line.text[:1] in (" ", "\t"):
                continue
            else:
                self._inside.discard(line.source)
                yield line


def short(line: LogLine, width: int) -> str:
    """A line with its source and time of day; a step's fits in `width` columns if it can."""
    found = _OURS.match(line.text) or _SCRIPTS.match(line.text)
    if found is None:
        return f"{line.source}: {line.text}"
    head, text = f"{line.source}: {found['time']} ", found["text"]
    level = found.groupdict().get("level", "INFO")
    if level != "INFO":
        return f"{head}{level} {text}"
    return head + (fitted(text, width - len(head)) if _STEP.match(text) else text)


def fitted(text: str, width: int) -> str:
    """A step's line with as many of its parts as there is room for."""
    parts = text.split(" | ")
    for drop in (*_LEAST_FIRST, "GiB"):
        if len(" | ".join(parts)) <= width:
            break
        parts = [re.sub(r"^(\d[\d.]* s) \(.*\)$", r"\1", part) for part in parts]  # phases first
        if len(" | ".join(parts)) > width:
            parts = [part for part in parts if not _is(part, drop)]
    return " | ".join(parts)


def _is(part: str, name: str) -> bool:
    return part.startswith(f"{name} ") or part.endswith(f" {name}")
