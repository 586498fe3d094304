"""Converts public data sets, as published, to prompts for a job."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from relax_hpc.data.media.kinds import Modality, encoding_of, name_encodings
from relax_hpc.data.rows import KINDS, DataRow, open_rows
from relax_hpc.environments.rewards.answers import last_tag
from relax_hpc.errors import ConfigError, none_of, without_number
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.user_files import HUB, write_named

Fields = Mapping[str, Any]


class DataSetRow(NamedTuple):
    prompt: str
    answer: str
    images: tuple[str, ...] = ()
    """Files in the folder of the prompts, in the order of the prompt's places."""
    videos: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.images, *self.videos, *self.audios)


class RowMedium(NamedTuple):
    modality: Modality
    content: bytes | Path


class DataSet(NamedTuple):
    name: str
    """As on the command line and in `source` of a prompt."""
    hub: str
    """Name on the Hugging Face hub."""
    splits: tuple[str, ...]
    """Sets on the hub, as a job writes them after the name."""
    task: Callable[[Fields], DataSetRow]
    """Makes a task of a row, without its media; a ValueError says what is wrong with it."""
    media: Callable[[Fields, Path | None], Sequence[RowMedium]] = lambda _, __: ()
    """Reads the media of a row of a file in a folder; a ValueError says what is wrong with them."""
    heldout: str = "test"
    """Part of the name of a file or split that is not trained on."""
    kinds: tuple[str, ...] = KINDS
    """Suffixes of its files."""

    @property
    def download(self) -> str:
        """Command that fetches it, for a machine with a network."""
        return f"hf download {self.hub} --repo-type dataset --local-dir {self.name}"


def _lacks(fields: Fields, key: str) -> ValueError:
    return ValueError(f"has no {key}, but {', '.join(fields) or 'nothing'}")


def _text(fields: Fields, key: str) -> str:
    if key not in fields:
        raise _lacks(fields, key)
    if not isinstance(fields[key], str) or not fields[key].strip():
        raise ValueError(f"{key} is no text")
    return str(fields[key]).strip()


def _letter(fields: Fields, key: str, of: str) -> str:
    """Returns the letter of a choice in a solution's tag.

    Args:
        of: the valid letters.
    """
    found = (last_tag(_text(fields, key), "answer") or "").strip()
    if len(found) != 1 or found not in of:
        raise ValueError(f"{key} has none of the letters {of} between <answer> and </answer>")
    return found


def _image(value: object, key: str) -> RowMedium:
    """Reads an image as the hub's Parquet files have it, {bytes, path}."""
    content = value.get("bytes") if isinstance(value, Mapping) else None
    if not isinstance(content, bytes) or not content:
        raise ValueError(f"{key} is no image with its bytes")
    return RowMedium("image", content)


def beside(folder: Path | None, value: object, key: str, modality: Modality) -> RowMedium:
    """Finds a medium beside the file of its row.

    Raises:
        ValueError: it is missing, or outside that folder.
    """
    if folder is None or not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} names no file")
    path = (folder / value).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{key} = {value!r}: is outside of the folder of the rows")
    if not path.is_file():
        raise ValueError(f"{key} = {value!r}: there is no such file beside the rows")
    return RowMedium(modality, path)


_PLACE = "<image>"
_THINK = "Think step by step between <think> and </think>, and then"
_CHOOSE = f"{_THINK} write the letter of your choice alone between <answer> and </answer>."
_BOX = "put the final answer into \\boxed{}."
_FINAL = re.compile(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def _gsm8k(fields: Fields) -> DataSetRow:
    found = _FINAL.search(_text(fields, "answer"))
    if found is None:
        raise ValueError("answer does not end with #### and a number")
    wish = "Think step by step, and put the final number into \\boxed{}."
    return DataSetRow(f"{_text(fields, 'question')}\n\n{wish}", found[1].replace(",", ""))


_BEFORE = "Solve the following math problem step by step."
_AFTER = "Remember to put your answer on its own line"
_ANSWERS = ("label", "solution", "answer")
"""Fields that hold the answer of DAPO-Math in different editions."""


def _dapo_math(fields: Fields) -> DataSetRow:
    return DataSetRow(f"{_problem(fields)}\n\nThink step by step, and {_BOX}", _answer(fields))


def _problem(fields: Fields) -> str:
    """Returns the problem without its own answer format, which differs from ours."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        said = _text(prompt[-1], "content")
    else:
        said = _text(fields, "prompt")
    if said.startswith(_BEFORE):
        said = said.partition("\n\n")[2]
    return said.partition(_AFTER)[0].strip()


def _answer(fields: Fields) -> str:
    model = fields.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return _text(model, "ground_truth")
    there = [key for key in _ANSWERS if key in fields]
    if not there:
        raise ValueError(f"has no reward_model.ground_truth, {', '.join(_ANSWERS)}")
    return _text({there[0]: str(fields[there[0]])}, there[0])


_STARTER = "Begin with this code:"
_STDIN = "It reads from standard input and prints to standard output."
_CALLED = "It defines a function `{}`, or a class `Solution` with that method, which is called."
_PROGRAM = "Think step by step, and end with the whole program in one ```python block."
_MOST_TESTS = 15
"""Most tests of a problem; the longest inputs are kept."""
_LONGEST = 65_536
"""Characters of a test; longer ones are used only if all are longer."""


def _deepcoder(fields: Fields) -> DataSetRow:
    """The answer is the tests, as JSON for the reward `code`."""
    tests = _tests(_text(fields, "tests"))
    starter = str(fields.get("starter_code") or "").strip()
    parts = [_text(fields, "problem"), f"{_STARTER}\n```python\n{starter}\n```" if starter else ""]
    name = tests.get("fn_name")
    if not name:
        parts.append(_STDIN)
    elif name not in starter:
        parts.append(_CALLED.format(name))
    prompt = "\n\n".join([*filter(None, parts), _PROGRAM])
    return DataSetRow(prompt, json.dumps(tests, ensure_ascii=False))


def _tests(said: str) -> dict[str, Any]:
    """Reads the tests in any form of the data set: pairs, or a list of them.

    Raises:
        ValueError: they have another form.
    """
    given = json.loads(said)
    if isinstance(given, dict):
        pairs = list(zip(given.get("inputs", ()), given.get("outputs", ()), strict=True))
        function = given.get("fn_name")
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        pairs = [(each.get("input"), each.get("output")) for each in given]
        functions = {_function(each) for each in given}
        if len(functions) > 1:
            raise ValueError(
                f"tests call {', '.join(sorted(map(str, functions)))}; one is expected"
            )
        function = functions.pop() if functions else None
    else:
        raise ValueError("tests are neither a table nor a list of tables")
    if not pairs or any(None in pair for pair in pairs):
        raise ValueError("tests lack inputs or outputs")
    inputs, outputs = zip(*_chosen(pairs), strict=True)
    tests = {"inputs": list(inputs), "outputs": list(outputs)}
    return {"fn_name": function, **tests} if function else tests


def _function(test: Fields) -> str | None:
    """The function that a test calls; None if it reads standard input."""
    metadata = test.get("metadata")
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    return test.get("fn_name") or named


def _chosen(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Keeps at most `_MOST_TESTS`, in their order."""
    sizes = [len(json.dumps(pair)) for pair in pairs]
    fitting = [index for index, size in enumerate(sizes) if size <= _LONGEST]
    longest = sorted(fitting or [sizes.index(min(sizes))], key=lambda index: -sizes[index])
    return [pairs[index] for index in sorted(longest[:_MOST_TESTS])]


def _openr1mm(fields: Fields) -> DataSetRow:
    """The answer is the tag's content in the solution, or all of it without a tag."""
    problem = _text(fields, "problem").replace(_PLACE, "").strip()
    solution = _text(fields, "solution")
    answer = (last_tag(solution, "answer") or solution).strip()
    wish = f"{_THINK} write the final answer between <answer> and </answer>."
    return DataSetRow(f"{_PLACE}{problem}\n\n{wish}", answer)


def _one_image(fields: Fields, _: Path | None) -> Sequence[RowMedium]:
    if "image" not in fields:
        raise _lacks(fields, "image")
    return [_image(fields["image"], "image")]


def _geometry3k(fields: Fields) -> DataSetRow:
    problem = _text(fields, "problem")
    places, shown = problem.count(_PLACE), len(_images(fields, None))
    if places != shown:
        raise ValueError(f"problem has {places} places {_PLACE}, and there are {shown} images")
    return DataSetRow(f"{problem}\n\n{_THINK} {_BOX}", _text(fields, "answer"))


def _images(fields: Fields, _: Path | None) -> Sequence[RowMedium]:
    found = fields.get("images")
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise _lacks(fields, "images")
    return [_image(each, "images") for each in found]


def _avqa(fields: Fields) -> DataSetRow:
    options = fields.get("options")
    if not isinstance(options, Sequence) or not options or isinstance(options, str):
        raise _lacks(fields, "options")
    letters = "ABCD"[: len(options)]
    starts = [f"{each}." for each in letters]
    if not all(str(o).strip().startswith(s) for o, s in zip(options, starts, strict=True)):
        raise ValueError(f"options do not begin with {', '.join(starts)}")
    lines = "\n".join(str(option).strip() for option in options)
    asked = f"{_text(fields, 'problem')}\n{lines}\n\nLook and listen. {_CHOOSE}"
    return DataSetRow(f"<image><audio>{asked}", _letter(fields, "solution", letters))


def _image_and_sound(fields: Fields, folder: Path | None) -> Sequence[RowMedium]:
    files = fields.get("path")
    if not isinstance(files, Mapping):
        raise _lacks(fields, "path")
    return [
        beside(folder, files.get("image"), "path.image", "image"),
        beside(folder, files.get("audio"), "path.audio", "audio"),
    ]


def _nextqa(fields: Fields) -> DataSetRow:
    """The problem already has its choices."""
    problem = _text(fields, "problem").removeprefix("<video>").strip()
    asked = f"<video>{problem}\n\nWatch the video. {_CHOOSE}"
    return DataSetRow(asked, _letter(fields, "solution", "ABCDE"))


def _video(fields: Fields, folder: Path | None) -> Sequence[RowMedium]:
    if "video_filename" not in fields:
        raise _lacks(fields, "video_filename")
    return [beside(folder, fields["video_filename"], "video_filename", "video")]


_TRAIN = ("/train",)
_CODE = (
    ":primeintellect/train", ":taco/train", ":lcbv5/train", ":lcbv5/test", ":codeforces/test",
)  # fmt: skip
_OPENR1MM, _AVQA = "lmms-lab/multimodal-open-r1-8k-verified", "harryhsing/AVQA-R1-6K"
_NEXTQA = "Zhang199/TinyLLaVA-Video-R1-training-data"
DATA_SETS = {
    each.name: each
    for each in (
        DataSet("gsm8k", "openai/gsm8k", (":main/train", ":main/test"), _gsm8k),
        DataSet("dapo-math", "BytedTsinghua-SIA/DAPO-Math-17k", _TRAIN, _dapo_math),
        DataSet("deepcoder", "agentica-org/DeepCoder-Preview-Dataset", _CODE, _deepcoder),
        DataSet("openr1mm", _OPENR1MM, _TRAIN, _openr1mm, _one_image),
        DataSet("geometry3k", "hiyouga/geometry3k", (*_TRAIN, "/validation", "/test"),
                _geometry3k, _images),
        DataSet("avqa", _AVQA, (), _avqa, _image_and_sound, heldout="valid", kinds=(".json",)),
        DataSet("nextqa", _NEXTQA, (), _nextqa, _video, kinds=(".jsonl",)),
    )
}  # fmt: skip


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
