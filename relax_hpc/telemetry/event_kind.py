"""The declaration of an event."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class EventKind(NamedTuple):
    """One kind of line in `events/*.jsonl`."""

    by: str
    """Components that write it; "all" is every task."""
    meaning: str
    fields: Mapping[str, str] = MappingProxyType({})
    """Field -> meaning, "" where the name says it; "area/..." stands for all that begin so."""
    tags: Mapping[str, str] = MappingProxyType({})
    """Field -> tag of its curve in TensorBoard and elsewhere; <name> stands for a value of that
    field. A number without one is not drawn."""
