"""Lists the public data sets of `relax-hpc prepare`: the source of each, and how to read its rows.

gsm8k: 8.5 thousand word problems whose answer is a number (arXiv:2110.14168).
dapo-math: 17 thousand competition problems with a whole number as the answer (arXiv:2503.14476).
deepcoder: 24 thousand programming problems with unit tests.
openr1mm: 8 thousand verified problems of mathematics, each about one image (Multimodal Open R1).
geometry3k: 3 thousand problems about drawn figures (arXiv:2105.04165).
avqa: 6 thousand questions about an image and a sound, four choices (AVQA-R1-6K, arXiv:2505.04623).
nextqa: questions about short videos, five choices each (NExT-QA, arXiv:2105.08276), in the edition
of TinyLLaVA-Video-R1 (arXiv:2504.09641): 5 thousand, of at most 30 seconds.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.data.media.kinds import Modality
from relax_hpc.data.rows import KINDS
from relax_hpc.environments.rewards.answers import last_tag

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
