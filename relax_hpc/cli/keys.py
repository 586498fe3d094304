"""`relax-hpc keys`: what can be set in a job. The same tables are pages of docs/."""

import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from relax_hpc.config.keys import TOLD_ONCE, Key, keys_of
from relax_hpc.config.run import RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.schema import COLUMNS, Column
from relax_hpc.sections import SharedResources
from relax_hpc.telemetry.event_table import EVENTS

_MADE = "<!-- made by `make docs` of what the code declares; do not edit -->\n"
_FEW = 3
"""Keys of a name that are told of, where somebody asks for the name alone."""


def keys(
    section: Annotated[str, typer.Argument(help="Only keys that begin so.")] = "",
) -> None:
    """Every setting of a job with its type, its default, and what it does."""
    for key in matching(section):
        typer.echo("\n".join(lines_of(key)))


def matching(section: str) -> list[Key]:
    """The settings whose dotted name is `section` or below it.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    known = all_keys()
    if TOLD_ONCE.keys() & section.split("."):
        known = list(dict.fromkeys([*known, *_of_components()]))
    found = [key for key in known if f"{key.name}.".startswith(f"{section}." if section else "")]
    if found:
        return found
    names = {name for key in known for name in _prefixes(key.name)}
    close = difflib.get_close_matches(section, names, n=1)
    same = [key.name for key in known if key.name.endswith(f".{section}")]
    if 1 <= len(same) <= _FEW:
        hint = f"did you mean {' or '.join(same)}?"
    else:
        hint = f"did you mean {close[0]}?" if close else "relax-hpc keys lists them all"
    raise ConfigError(f"{section}: no key of a job; {hint}")


def explained(job: BaseModel, section: str) -> Iterator[str]:
    """Explains the keys at or below `section`, and says their values in a job.

    Raises:
        ConfigError: there is no such key.
    """
    for key in matching(section):
        yield from lines_of(key)
        for name, value in _values(job, key.name.split("."), ""):
            yield f"    here: {name} = {json.dumps(value, default=_plain)}"


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _values(node: object, path: Sequence[str], prefix: str) -> Iterator[tuple[str, object]]:
    """Finds the values of a key in a job, one for each name that a user chose on the way."""
    if not path:
        yield prefix, node
        return
    first, *rest = path
    found = node if isinstance(node, dict) else dict(node) if isinstance(node, BaseModel) else {}
    for name in found if first.startswith("<") else [first]:
        if name in found:
            yield from _values(found[name], rest, f"{prefix}.{name}" if prefix else name)


def all_keys() -> list[Key]:
    """Lists the keys of reinforcement learning, of supervised fine-tuning, and those that both tell
    once."""
    learning = keys_of(RunConfig)
    names = {key.name for key in learning}
    tuning = [key for key in keys_of(SftRunConfig) if key.name not in names]
    told_once = [
        key._replace(name=f"<component>.{section}.{key.name}")
        for section, holds in TOLD_ONCE.items()
        for key in keys_of(holds)
    ]
    headings = tuple(f".{section}" for section in TOLD_ONCE)
    own = [key for key in [*learning, *tuning] if key.text or not key.name.endswith(headings)]
    return own + told_once


def _of_components() -> Iterator[Key]:
    """Yields the keys of sections that are told once, under the name of each component."""
    for key in dict.fromkeys([*keys_of(RunConfig), *keys_of(SftRunConfig)]):
        section = key.name.rpartition(".")[2]
        if section in TOLD_ONCE:
            holds = SharedResources if key.name == section else TOLD_ONCE[section]
            yield from (each._replace(name=f"{key.name}.{each.name}") for each in keys_of(holds))


def lines_of(key: Key) -> list[str]:
    """Name, default and type in a line, then what the key does."""
    default = f" = {key.default}" if key.default not in ("", "required") else ""
    required = " (required)" if key.default == "required" else ""
    return [f"{key.name}{default}{required}   [{key.type}]", f"    {key.text}"]


def config_page() -> str:
    """docs/config.md."""
    sections: dict[str, list[Key]] = {}
    for key in all_keys():
        section, _, _ = key.name.rpartition(".")
        sections.setdefault(section, []).append(key)
    tables = [
        f"## {f'[{section}]' if section else 'Top level'}\n\n"
        + _table(
            ("key", "type", "default", ""),
            ((f"`{k.name.rpartition('.')[2]}`", k.type, _code(k.default), k.text) for k in found),
        )
        for section, found in sections.items()
    ]
    head = (
        "# Keys of a job\n\nA job is a TOML file; `--set section.key=value` overrides a key. "
        "`relax-hpc keys actor.optimizer` prints a part of this page, `relax-hpc check JOB "
        "--explain KEY` one key with its value in a job. An empty default: leaving the key out "
        "has a meaning of its own.\n"
    )
    return "\n".join([_MADE + head, *tables])


def events_page() -> str:
    """docs/events.md."""
    rows = (
        (
            kind.by,
            f"`{name}`",
            kind.meaning,
            "; ".join(_field(*each) for each in kind.fields.items()),
        )
        for name, kind in EVENTS.items()
    )
    head = (
        "# Events\n\nOne JSON object per line in `events/<component>-<rank>.jsonl`, with `time` "
        "(seconds since 1970), `role`, `rank`, `pid`, `event`, and the fields below; `time/...` "
        "stands for all names that begin so. JSON knows no number that is not finite: such a field "
        'is null, and `not_finite` says what it was, e.g. `"loss": null, "not_finite": {"loss": '
        '"NaN"}`. Of a trainer or scorer rank 0 writes all but `start`, `world`, `error` and '
        "`resume`, which every rank writes.\n"
    )
    table = _table(("by", "event", "when", "fields"), rows)
    curves = (
        "## Curves\n\nTags of the numbers that [boards](boards.md) show, over the steps. Of an "
        "evaluation the step is that of the policy. What engines and producers say between two "
        "steps is one point.\n"
    )
    return "\n".join([_MADE + head, table, curves, _table(("tag", "event", "field"), _tags())])


def _tags() -> Iterator[tuple[str, str, str]]:
    tags = [(tag, name, field) for name, kind in EVENTS.items() for field, tag in kind.tags.items()]
    yield from ((f"`{tag}`", f"`{name}`", f"`{field}`") for tag, name, field in sorted(tags))


def columns_page() -> str:
    """docs/columns.md."""
    rows = (
        (
            f"`{name}`",
            _shape(column),
            column.axis,
            column.writer,
            column.meaning + ("" if column.required else " (optional)"),
        )
        for name, column in COLUMNS.items()
    )
    head = "# Columns of a shard\n\nWho writes what; [bus.md](bus.md) has the bytes.\n"
    return "\n".join([_MADE + head, _table(("column", "type", "per", "writer", ""), rows)])


PAGES = {"config.md": config_page, "events.md": events_page, "columns.md": columns_page}


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _field(name: str, meaning: str) -> str:
    return f"`{name}` {meaning}".rstrip()


def _code(text: str) -> str:
    return f"`{text}`" if text and text != "required" else text


def _shape(column: Column) -> str:
    if column.width is None:
        return column.dtype
    return f"{column.dtype} [{'K' if column.width < 0 else column.width}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def write(folder: Path) -> None:
    """Makes the pages anew."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
