"""Public data sets, as their authors publish them, to prompts that a job trains on."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from relax_hpc.errors import ConfigError
from relax_hpc.media.kinds import Modality, encoding_of, named
from relax_hpc.preparation.avqa import AVQA
from relax_hpc.preparation.dapo_math import DAPO_MATH
from relax_hpc.preparation.data_set import DataSet, Shown, Task
from relax_hpc.preparation.deepcoder import DEEPCODER
from relax_hpc.preparation.geometry3k import GEOMETRY3K
from relax_hpc.preparation.gsm8k import GSM8K
from relax_hpc.preparation.nextqa import NEXTQA
from relax_hpc.preparation.openr1mm import OPENR1MM
from relax_hpc.prompts.files import open_rows
from relax_hpc.prompts.rows import Row
from relax_hpc.user_files import HUB, written

DATA_SETS = {
    data_set.name: data_set
    for data_set in (GSM8K, DAPO_MATH, DEEPCODER, OPENR1MM, GEOMETRY3K, AVQA, NEXTQA)
}
_FROM_HUB = "hf"
"""Stands for the Hugging Face hub, or for its cache, in place of a folder."""
_CHUNK_BYTES = 1 << 24


class Made(NamedTuple):
    train: int
    heldout: int
    repeated: int
    """Rows whose prompt came before; they were left out."""


class _Source(NamedTuple):
    is_heldout: bool
    rows: Iterable[Row]


def prepare(name: str, source: str, out: Path, *, heldout: int) -> Made:
    """Writes train.jsonl, heldout.jsonl and folders of media; from the same files always the same.

    Args:
        name: of the data set.
        source: a file or a folder of what was downloaded, or "hf".
        out: folder of the two files, which must not be there.
        heldout: prompts that are held out where the data set has no test part.

    Raises:
        ConfigError: no such data set; the source cannot be had or is something else; a file is
            there or cannot be written.
    """
    if name not in DATA_SETS:
        raise ConfigError(f"{name}: no such data set; there are {', '.join(DATA_SETS)}")
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
        written(out / "train.jsonl", "--out") as train_draft,
        written(out / "heldout.jsonl", "--out") as heldout_draft,
        train_draft.open("w") as train_file,
        heldout_draft.open("w") as heldout_file,
    ):
        if any(task.files for task in tasks):
            _write_media(data_set, source, out)
        for task in tasks:
            _write(heldout_file if task in held else train_file, task, name)
    return Made(len(tasks) - len(held), len(held), repeated)


def _tasks(data_set: DataSet, sources: Iterable[_Source]) -> tuple[dict[Task, bool], int]:
    """The tasks in the order of the files, each prompt once, and whether it is held out."""
    by_prompt: dict[tuple[str, tuple[str, ...]], tuple[Task, bool]] = {}
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
    """The files of a folder, also of those in it, as jobs name them; or the sets of the hub."""
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


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file: of JSON lines, Parquet, or one list in JSON."""
    if path.suffix != ".json":
        opened = open_rows(path)
        return (opened[index] for index in range(len(opened)))
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{path}: is no list of objects")
    return (Row(f"{path}, row {n}", fields, path.parent) for n, fields in enumerate(listed))


def _media_of(data_set: DataSet, row: Row) -> list[tuple[str, Shown]]:
    """The media of a row, each with the file that it gets; equal ones are one file.

    Raises:
        ValueError: one is none that is decoded here.
    """
    return [(_file_of(shown), shown) for shown in data_set.media(row.fields, row.folder)]


def _file_of(shown: Shown) -> str:
    digest, named_as = hashlib.sha256(), "an image" if shown.modality == "image" else None
    with _opened(shown) as file:
        encoding = encoding_of(file)
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    if encoding.modality != shown.modality or encoding.kind is None:
        what = named_as or f"a file of {shown.modality}"
        raise ValueError(f"{what} is {encoding.name}; {named(shown.modality)} are read")
    return f"{shown.modality}s/{digest.hexdigest()[:32]}.{encoding.name.lower()}"


def _opened(shown: Shown) -> BinaryIO:
    if isinstance(shown.content, bytes):
        return io.BytesIO(shown.content)
    return shown.content.open("rb")


def _with_files(task: Task, media: Sequence[tuple[str, Shown]]) -> Task:
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


def _write_medium(shown: Shown, path: Path) -> None:
    """Writes a medium, or links to its file; copies that where it is on another file system."""
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        return
    if isinstance(shown.content, bytes):
        path.write_bytes(shown.content)
        return
    try:
        os.link(shown.content, path)
    except OSError:
        shutil.copyfile(shown.content, path)


def _rank(task: Task) -> bytes:
    return hashlib.sha256("".join([task.prompt, *task.files]).encode()).digest()


def _write(file: TextIO, task: Task, source: str) -> None:
    said = {key: value for key, value in task._asdict().items() if value}
    file.write(json.dumps({**said, "source": source}, ensure_ascii=False) + "\n")
