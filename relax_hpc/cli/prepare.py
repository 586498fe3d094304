"""Converts public data sets, as published, to prompts for a job."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from relax_hpc.cli.data_sets import DATA_SETS, DataSet, DataSetRow, RowMedium
from relax_hpc.data.media.kinds import Modality, encoding_of, name_encodings
from relax_hpc.data.rows import DataRow, open_rows
from relax_hpc.errors import ConfigError, none_of, without_number
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.user_files import HUB, write_named

_FROM_HUB = "hf"
"""Stands for the Hugging Face hub, or its cache, in place of a folder."""
_CHUNK_BYTES = 1 << 24


class Made(NamedTuple):
    train: int
    heldout: int
    repeated: int
    """Rows left out because their prompt came before."""


class _Source(NamedTuple):
    is_heldout: bool
    rows: Iterable[DataRow]


def prepare(name: str, source: str, out: Path, *, heldout: int) -> Made:
    """Writes train.jsonl, heldout.jsonl and folders of media; reproducible from the same files.

    Args:
        name: of the data set.
        source: a file or a folder of the download, or "hf".
        out: folder of the two files, which must not exist.
        heldout: held-out prompts, if the data set has no test part.

    Raises:
        ConfigError: no such data set; the source is unavailable or something else; a file exists,
            or cannot be written.
    """
    if name not in DATA_SETS:
        raise ConfigError(f"{name}: {none_of(name, DATA_SETS)}")
    data_set = DATA_SETS[name]
    tasks, repeated = _tasks(data_set, _sources(data_set, source))
    held = {task for task, is_heldout in tasks.items() if is_heldout}
    if not held:
        held = set(sorted(tasks, key=_rank)[:heldout])
    if len(held) == len(tasks):
        raise ConfigError(
            f"--from {source}: has {len(tasks)} prompts, and none is left to train on"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}") from None
    with (
        write_named(out / "train.jsonl", "--out") as train_file,
        write_named(out / "heldout.jsonl", "--out") as heldout_file,
    ):
        if any(task.files for task in tasks):
            _write_media(data_set, source, out)
        for task in tasks:
            _write(heldout_file if task in held else train_file, task, name)
    return Made(len(tasks) - len(held), len(held), repeated)


def _tasks(data_set: DataSet, sources: Iterable[_Source]) -> tuple[dict[DataSetRow, bool], int]:
    """Returns the tasks in the order of the files, each prompt once, and whether it is held out."""
    by_prompt: dict[tuple[str, tuple[str, ...]], tuple[DataSetRow, bool]] = {}
    count = 0
    for source in sources:
        for row in source.rows:
            count += 1
            try:
                task = _with_files(data_set.task(row.fields), _media_of(data_set, row))
            except ValueError as error:
                raise ConfigError(
                    f"{row.where}: {error}; name the files of {data_set.hub}, or one of them"
                ) from None
            asked = task.prompt, task.files
            known, is_heldout = by_prompt.get(asked, (task, False))
            by_prompt[asked] = known, is_heldout or source.is_heldout
    return dict(by_prompt.values()), count - len(by_prompt)


def _sources(data_set: DataSet, source: str) -> Iterator[_Source]:
    try:
        for name in _names(data_set, source):
            is_heldout = data_set.heldout in Path(name).stem
            yield _Source(is_heldout, _rows(Path(name)))
    except ConfigError as error:
        raise ConfigError(
            f"--from {source}: {error}; where there is a network: {data_set.download}; then "
            f"--from {data_set.name}"
        ) from None


def _names(data_set: DataSet, source: str) -> list[str]:
    """Lists the files of a folder, recursively, as jobs name them; or the hub's sets."""
    if source == _FROM_HUB:
        if not data_set.splits:
            raise ConfigError("its media lie in files beside the rows, which have to be downloaded")
        return [f"{HUB}{data_set.hub}{split}" for split in data_set.splits]
    folder = Path(source)
    if not folder.is_dir():
        return [source]
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    files = [str(folder / path) for path in shown if path.suffix in data_set.kinds]
    if not files:
        raise ConfigError(f"has no {' or '.join(data_set.kinds)} files")
    return files


def _rows(path: Path) -> Iterator[DataRow]:
    """Yields the rows of a file: JSON lines, Parquet, or one JSON list."""
    if path.suffix != ".json":
        opened = open_rows(path)
        return (opened[index] for index in range(len(opened)))
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {without_number(error)}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{path}: is no list of objects")
    return (DataRow(f"{path}, row {n}", fields, path.parent) for n, fields in enumerate(listed))


def _media_of(data_set: DataSet, row: DataRow) -> list[tuple[str, RowMedium]]:
    """Returns the media of a row with their files; equal ones share a file.

    Raises:
        ValueError: one cannot be decoded here.
    """
    return [(_file_of(shown), shown) for shown in data_set.media(row.fields, row.folder)]


def _file_of(shown: RowMedium) -> str:
    digest, named_as = hashlib.sha256(), "an image" if shown.modality == "image" else None
    with _open(shown) as file:
        encoding = encoding_of(file)
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    if encoding.modality != shown.modality or encoding.kind is None:
        what = named_as or f"a file of {shown.modality}"
        raise ValueError(f"{what} is {encoding.name}; {name_encodings(shown.modality)} are read")
    return f"{shown.modality}s/{digest.hexdigest()[:32]}.{encoding.name.lower()}"


def _open(shown: RowMedium) -> BinaryIO:
    if isinstance(shown.content, bytes):
        return io.BytesIO(shown.content)
    return shown.content.open("rb")


def _with_files(task: DataSetRow, media: Sequence[tuple[str, RowMedium]]) -> DataSetRow:
    def of(modality: Modality) -> tuple[str, ...]:
        return tuple(file for file, shown in media if shown.modality == modality)

    return task._replace(images=of("image"), videos=of("video"), audios=of("audio"))


def _write_media(data_set: DataSet, source: str, out: Path) -> None:
    try:
        for each in _sources(data_set, source):
            for row in each.rows:
                for file, shown in _media_of(data_set, row):
                    _write_medium(shown, out / file)
    except OSError as error:
        raise ConfigError(f"--out {out}: media cannot be written: {error.strerror}") from None


def _write_medium(shown: RowMedium, path: Path) -> None:
    """Writes a medium, or hard-links its file; copies across file systems."""
    path.parent.mkdir(exist_ok=True)
    if path.is_file():
        return
    if not isinstance(shown.content, bytes):
        folder = permissions.open_folder(path.parent)
        try:
            os.link(shown.content, path.name, dst_dir_fd=folder)
            return
        except OSError:
            pass
        finally:
            os.close(folder)
    with write_named(path, "--out") as file, _open(shown) as content:
        shutil.copyfileobj(content, file)


def _rank(task: DataSetRow) -> bytes:
    return hashlib.sha256("".join([task.prompt, *task.files]).encode()).digest()


def _write(file: BinaryIO, task: DataSetRow, source: str) -> None:
    said = {key: value for key, value in task._asdict().items() if value}
    file.write((json.dumps({**said, "source": source}, ensure_ascii=False) + "\n").encode())
