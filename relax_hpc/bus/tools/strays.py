"""Files on a bus that nothing accounts for: what a crash left, and what does not belong there."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from relax_hpc.bus.layout import BusHeader
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.findings import Finding
from relax_hpc.bus.tools.inventory import File, Writer
from relax_hpc.paths import BusPaths

_SHARD = re.compile(r"\d{12}\.h5")
_FENCE = re.compile(r"f\d+")
_PLAN = re.compile(r"FENCE\.\d{6}|f\d{6}\.log|snap\.\d+\.\d+\.json")
_OWN = ("log", "ballast")


def find_strays(paths: BusPaths, header: BusHeader, writers: Sequence[Writer]) -> Iterator[Finding]:
    """Names what `layout` would not have made and no record names.

    Drafts and shards without a record are not wrong: their writer is at work, or it died, and then
    it deletes them at its next start.
    """
    owners = inventory.writers_of(header)
    for writer in writers:
        for file in inventory.unrecorded(paths, writer):
            yield _unrecorded(file)
        yield from _unknown(
            paths.producer(writer.name), lambda n: n in _OWN or bool(_FENCE.fullmatch(n))
        )
    yield from _unknown(paths.producer("x").parent, lambda name: name in owners)
    yield from _unknown(paths.plan, lambda name: bool(_PLAN.fullmatch(name)))
    yield from _unknown(paths.credits.parent, lambda name: name == paths.credits.name)
    known = (paths.header.name, paths.plan.name, paths.credits.parent.name, "p")
    yield from _unknown(paths.root, lambda name: name in known)


def is_orphan(file: File) -> bool:
    """Whether an unrecorded file is one that a writer of the bus makes."""
    return file.path.name.startswith(".") or bool(_SHARD.fullmatch(file.path.name))


def _unrecorded(file: File) -> Finding:
    if is_orphan(file):
        what = "no record names it: unfinished, or left by a crash; its writer's next start and "
        return Finding("orphan", str(file.path), f"{what}relax-hpc bus gc delete it", harmful=False)
    return _foreign(file.path)


def _unknown(folder: Path, is_known: Callable[[str], bool]) -> Iterator[Finding]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):  # a draft of JSON, or what NFS keeps of an open file
            yield Finding("orphan", str(path), "is a draft that was not finished", harmful=False)
        elif not is_known(path.name):
            yield _foreign(path)


def _foreign(path: Path) -> Finding:
    return Finding("foreign", str(path), "is no file of a bus; move it elsewhere")
