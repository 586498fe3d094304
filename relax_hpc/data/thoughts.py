"""Separates thoughts from answers in a response, and real tags from quoted ones."""

import re
from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_TAG = re.compile(r"<(/?)think>")
_FENCE = re.compile(r"^[ \t]*```([^\n]*)", re.MULTILINE)
_LOOK_BACK = 80
_QUOTES, _OPENING = "'\"`", "'\"`([{*"

Span = tuple[int, int]


class Said(NamedTuple):
    """The part of a text outside thoughts: after the last one that ends, before an open one.

    Empty if one begins and none ends.
    """

    begin: int
    """0 if none ends."""
    end: int


def strip_thoughts(text: str, *, in_thought: bool = False, data: Sequence[Span] = ()) -> Said:
    """Separates a response's answer from its thoughts.

    A thought ends at the first `</think>` that is not quoted: in quotes, in a fenced block, or in
    `data`. If all are quoted, the first one ends it. A later thought begins at `<think>` on a new
    line, or right after a word; inside a sentence it is a word, and so is `</think>` while no
    thought is open. Before any thought has ended, a lone `</think>` ends one opened before the
    text.

    Args:
        text: of a response.
        in_thought: the text before it opened a thought.
        data: spans whose tags are quoted, in order.
    """
    tags = [*_TAG.finditer(text)]
    if not tags:
        return Said(0, 0 if in_thought else len(text))
    spoken = _spoken(text, tags, data)
    ends = [number for number, tag in enumerate(tags) if tag[1]]
    real = [number for number in ends if number not in spoken]
    begin, opened, place = 0, 0 if in_thought else None, 0
    while place < len(tags):
        tag = tags[place]
        if opened is not None:
            after = _first(real, place) or _first(ends, place)
            if not after:
                break
            place = after[0]
            begin, opened = tags[place].end(), None
        elif place in spoken:
            pass
        elif not tag[1]:
            opened = tag.start() if not begin or _begins(text, tag.start()) else None
        elif not begin:
            begin = tag.end()
        place += 1
    return Said(begin, len(text) if opened is None else opened * bool(begin))


def _first(numbers: Sequence[int], least: int) -> Sequence[int]:
    """Returns the first number that is not less than `least`, if any."""
    at = bisect_left(numbers, least)
    return numbers[at : at + 1]


def _spoken(text: str, tags: Sequence[re.Match[str]], data: Sequence[Span]) -> set[int]:
    """Indices of quoted tags."""
    spans, fences = [*data], [*_find_fences(text)]
    found = set[int]()
    for number, tag in enumerate(tags):
        before, after = text[tag.start() - 1 : tag.start()], text[tag.end() : tag.end() + 1]
        is_quoted = before == after and before in _QUOTES and before != ""
        if is_quoted or _lies_in(spans, tag.start()) or _lies_in(fences, tag.start()):
            found.add(number)
    return found


def _find_fences(text: str) -> Iterator[Span]:
    opened: int | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence.start()
        elif not fence[1].strip():
            yield opened, fence.end()
            opened = None


def _lies_in(spans: Sequence[Span], place: int) -> bool:
    number = bisect(spans, (place, len(spans) and spans[-1][1] + 1)) - 1
    return number >= 0 and place < spans[number][1]


def _begins(text: str, place: int) -> bool:
    """Whether a thought begins there, rather than a sentence mentioning the tag."""
    line = text[max(0, place - _LOOK_BACK) : place].rpartition("\n")[2]
    return not line.strip() or not (line[-1].isspace() or line[-1] in _OPENING)
