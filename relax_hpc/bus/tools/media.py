"""`bus media`: the images, videos and sounds of a prompt group as files again."""

from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.tools import selection
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import MediaKind
from relax_hpc.telemetry import tables
from relax_hpc.user_files import written

_OTHERS = {MediaKind.JPEG: "jpg", MediaKind.FRAMES: "zip", MediaKind.TENSOR: "npy"}
ENDINGS: dict[MediaKind, str] = {kind: _OTHERS.get(kind, kind.name.lower()) for kind in MediaKind}


class File(NamedTuple):
    """A medium that was written."""

    path: Path
    kind: str
    nbytes: int
    patches: str
    tokens: int
    canonical_xxh3: str


def write(paths: BusPaths, guid: int, folder: Path) -> list[File]:
    """Writes each medium of a prompt group once, as its bytes are on the bus.

    Args:
        paths: of the bus.
        guid: the prompt group.
        folder: where to; is made if it is not there.

    Returns:
        The files, by the places of the media.

    Raises:
        BusError: no such group, one without media, or damage.
        ConfigError: a file is there already, or cannot be written.
    """
    record = selection.of_guid(paths, guid)
    selection.check_on_disk(paths, [record])
    reader = Reader(paths)
    rows = reader.rows(record, range(record.num_trajectories), media.FACTS)
    wanted = [(row, n) for row, found in enumerate(rows) for n in range(len(found.media))]
    if not wanted:
        raise BusError(f"prompt group {guid}: has no media; relax-hpc bus show shows its text")
    tokens, files = dict[str, int](), list[File]()
    distinct: dict[str, tuple[int, int]] = {}
    for key, each in zip(wanted, reader.media(record, wanted), strict=True):
        distinct.setdefault(each.place, key)
        spans = rows[key[0]].media_spans
        tokens.setdefault(each.place, int(spans[spans[:, 0] == key[1], 2].sum()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; name another folder") from None
    for number, each in enumerate(reader.media(record, distinct.values())):
        medium = each.medium
        path = folder / f"guid{guid}_{number}.{ENDINGS[medium.kind]}"
        with written(path, "--out") as draft:
            draft.write_bytes(medium.data.tobytes())
        patches = " x ".join(map(str, medium.grid_thw)) if any(medium.grid_thw) else "-"
        digest = medium.canonical_xxh3.hex() or "-"
        files.append(
            File(path, medium.kind.name, len(medium.data), patches, tokens[each.place], digest)
        )
    reader.close()
    return files


def text(files: list[File]) -> str:
    """A line for each file."""
    head = ("file", "kind", "bytes", "patches", "tokens", "canonical array")
    return tables.align([head, *(tuple(map(str, file)) for file in files)])
