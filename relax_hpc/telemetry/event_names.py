"""Names of fields and curves, looked up in the table of events."""

from collections.abc import Iterable

from relax_hpc.telemetry.event_table import EVENTS


def undeclared(event: str, fields: Iterable[str]) -> list[str]:
    """Returns the names among `fields` that `EVENTS` does not have for `event`."""
    declared = EVENTS[event].fields
    return [name for name in fields if name not in declared and _area(name) not in declared]


def tag(event: str, field: str, **names: str) -> str | None:
    """The tag of a field's curve; None if the field is not drawn.

    Args:
        event: the kind.
        field: of it.
        names: values that stand in the tag.
    """
    tags = EVENTS[event].tags
    found = tags.get(field)
    if found is None and (area := _area(field)) in tags:
        found = tags[area].removesuffix("...") + field.partition("/")[2]
    if found is None:
        return None
    for name, value in names.items():
        found = found.replace(f"<{name}>", value)
    return found


def _area(name: str) -> str:
    area, slash, _ = name.partition("/")
    return f"{area}/..." if slash else ""
