"""The events of a run as they are written, by whoever reads along."""

from pathlib import Path

from relax_hpc.telemetry.events import Event, parse


class EventTail:
    """Reads each event once.

    Args:
        folder: of the events; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sizes: dict[str, int] = {}
        """Bytes that were read, by file."""

    def read(self) -> list[Event]:
        """The events that came since it was last asked, in order of time.

        A line is read once it is complete.
        """
        found = [event for path in sorted(self._folder.glob("*.jsonl")) for event in self._of(path)]
        return sorted(found, key=lambda event: event["time"])

    def _of(self, path: Path) -> list[Event]:
        seen = self.sizes.get(path.name, 0)
        if path.stat().st_size <= seen:
            return []
        with path.open("rb") as file:
            file.seek(seen)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.sizes[path.name] = seen + len(whole)
        return parse(whole)
