"""Public data sets, as their authors publish them, to prompts that a job trains on."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from relax_hpc.errors import ConfigError
from relax_hpc.media.kinds import encoding_of, named
from relax_hpc.preparation.dapo_math import DAPO_MATH
from relax_hpc.preparation.data_set import DataSet, Task
from relax_hpc.preparation.deepcoder import DEEPCODER
from relax_hpc.preparation.geometry3k import GEOMETRY3K
from relax_hpc.preparation.gsm8k import GSM8K
from relax_hpc.preparation.openr1mm import OPENR1MM
from relax_hpc.prompts.files import KINDS, open_rows
from relax_hpc.prompts.rows import Row
from relax_hpc.user_files import HUB, written

DATA_SETS = {
    data_set.name: data_set for data_set in (GSM8K, DAPO_MATH, DEEPCODER, OPENR1MM, GEOMETRY3K)
}
_FROM_HUB = "hf"
"""Stands for the Hugging Face hub, or for its cache, in place of a folder."""
_HELDOUT = "test"
"""In the name of a file, or of a split, whose rows are not trained on."""


class Made(NamedTuple):
    train: int
    heldout: int
    repeated: int
    """Rows whose prompt came before; they were left out."""


class _Source(NamedTuple):
    is_heldout: bool
    rows: Iterable[Row]


def prepare(name: str, source: str, out: Path, *, heldout: int) -> Made:
    """Writes train.jsonl, heldout.jsonl and images/; from the same files always the same.

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
        if any(task.images for task in tasks):
            _write_images(data_set, source, out)
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
                task = data_set.task(row.fields)
                task = task._replace(images=tuple(map(_file_of, data_set.images(row.fields))))
            except ValueError as error:
                raise ConfigError(
                    f"{row.where}: {error}; name the files of {data_set.hub}, or one of them"
                ) from None
            asked = task.prompt, task.images
            known, is_heldout = by_prompt.get(asked, (task, False))
            by_prompt[asked] = known, is_heldout or source.is_heldout
    return dict(by_prompt.values()), count - len(by_prompt)


def _sources(data_set: DataSet, source: str) -> Iterator[_Source]:
    try:
        for name in _names(data_set, source):
            opened = open_rows(Path(name))
            is_heldout = _HELDOUT in Path(name).stem
            yield _Source(is_heldout, (opened[index] for index in range(len(opened))))
    except ConfigError as error:
        raise ConfigError(
            f"--from {source}: {error}; where there is a network: {data_set.download}; then "
            f"--from {data_set.name}"
        ) from None


def _names(data_set: DataSet, source: str) -> list[str]:
    """The files of a folder, also of those in it, as jobs name them; or the sets of the hub."""
    if source == _FROM_HUB:
        return [f"{HUB}{data_set.hub}{split}" for split in data_set.splits]
    folder = Path(source)
    if not folder.is_dir():
        return [source]
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    files = [str(folder / path) for path in shown if path.suffix in KINDS]
    if not files:
        raise ConfigError(f"has no {' or '.join(KINDS)} files")
    return files


def _file_of(content: bytes) -> str:
    """Where an image is written: equal ones are one file.

    Raises:
        ValueError: it is none that is decoded here.
    """
    encoding = encoding_of(io.BytesIO(content))
    if encoding.modality != "image" or encoding.kind is None:
        raise ValueError(f"an image is {encoding.name}; {named('image')} are read")
    return f"images/{hashlib.sha256(content).hexdigest()[:32]}.{encoding.name.lower()}"


def _write_images(data_set: DataSet, source: str, out: Path) -> None:
    try:
        (out / "images").mkdir(exist_ok=True)
        for each in _sources(data_set, source):
            for row in each.rows:
                for content in data_set.images(row.fields):
                    (out / _file_of(content)).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out {out}: images cannot be written: {error.strerror}") from None


def _rank(task: Task) -> bytes:
    return hashlib.sha256("".join([task.prompt, *task.images]).encode()).digest()


def _write(file: TextIO, task: Task, source: str) -> None:
    said = {key: value for key, value in task._asdict().items() if value}
    file.write(json.dumps({**said, "source": source}, ensure_ascii=False) + "\n")
