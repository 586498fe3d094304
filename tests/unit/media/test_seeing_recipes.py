"""Jobs of models that see or hear, checked as far as that goes without weights; their data."""

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from media_files import clip, lines, tone, write_lines
from media_shapes import SHAPES, model_folder
from PIL import Image
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.cli.prepare import Made, prepare
from relax_hpc.errors import ConfigError
from relax_hpc.roles.facts import Facts

JOBS = Path(__file__).parents[3] / "jobs"
RECIPES = sorted([*JOBS.glob("qwen3-vl-*.toml"), *JOBS.glob("qwen3-omni-*.toml")])


def png(shade, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 0, 0)).save(file, kind)
    return {"bytes": file.getvalue(), "path": f"{shade}.png"}


def openr1mm_row(number, **fields):
    return {
        "image": png(number), "problem": "How long is AB?",
        "solution": f"<think> It is. </think>\n\n<answer> {number} </answer>",
        "original_question": "?", "original_answer": "!",
    } | fields  # fmt: skip


def geometry3k_row(number, **fields):
    return {
        "images": [png(number)], "problem": "<image>Find $x$.",
        "answer": f"\\frac{{{number}}}{{2}}",
    } | fields  # fmt: skip


def avqa_row(number, **fields):
    return {
        "problem_id": number, "problem": "What makes the sound?", "data_type": "image_audio",
        "options": ["A. a dog", "B. a train", "C. rain", "D. a bell"],
        "solution": f"<answer>{'ABCD'[number % 4]}</answer>",
        "path": {"image": f"images/{number}.png", "audio": f"audios/{number}.wav"},
    } | fields  # fmt: skip


def nextqa_row(number, **fields):
    return {
        "problem": "why did the boy fall?\nA. ice\nB. wind\nC. joy\nD. sleep\nE. a ball",
        "data_type": "video", "solution": f"<answer>{'ABCDE'[number % 5]}</answer>",
        "video_filename": f"NextQA/{number}.mp4",
    } | fields  # fmt: skip


ROWS = {
    "openr1mm": openr1mm_row, "geometry3k": geometry3k_row, "avqa": avqa_row, "nextqa": nextqa_row,
}  # fmt: skip


def downloaded(folder, name, parts):
    """The files of a data set; media that lie beside rows are of numbers 0 to 4."""
    folder.mkdir(parents=True)
    if name == "avqa":
        for part, rows in parts.items():
            for kind in ("images", "audios"):
                (folder / part / kind).mkdir(parents=True)
            for number in range(5):
                (folder / part / f"images/{number}.png").write_bytes(png(number)["bytes"])
                (folder / part / f"audios/{number}.wav").write_bytes(tone(0.5 + number / 10))
            (folder / part / f"omni_rl_format_{part}.json").write_text(json.dumps(rows))
        return folder
    if name == "nextqa":
        (folder / "NextQA").mkdir()
        for number in range(5):
            (folder / f"NextQA/{number}.mp4").write_bytes(clip(range(40 + number), rate=10))
        write_lines(folder / "nextqa_0-30s.jsonl", parts["train"])
        return folder
    for part, rows in parts.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("job", RECIPES, ids=lambda job: job.stem)
def test_a_recipe_passes_check_with_a_model_of_its_shape(job, tmp_path, monkeypatch):
    monkeypatch.setattr(Facts, "_check_weights", lambda *_: None)
    shape = next(shape for shape in SHAPES if job.stem.startswith(shape))
    name = job.stem.rsplit("-", 1)[1]
    rows = [ROWS[name](number) for number in range(3)]
    source = downloaded(tmp_path / "downloaded", name, {"train": rows})
    prepare(name, str(source), tmp_path / "data", heldout=1)
    overrides = {
        "run_root": tmp_path, "model.path": model_folder(shape, tmp_path / "model"),
        "prompts.train": tmp_path / "data" / "train.jsonl",
        "eval.heldout.path": tmp_path / "data" / "heldout.jsonl",
        "engines.rollout.resources.python": sys.executable,
    }  # fmt: skip
    options = [f"--set={key}={value}" for key, value in overrides.items()]
    answer = CliRunner().invoke(app, ["check", str(job), "--local", "--decode", *options])
    assert answer.exit_code == 0, f"{answer.output}\n{answer.exception}"
    named = job.relative_to(JOBS.parent)
    assert f"{named}" in (JOBS.parent / "docs" / "how-to" / "recipes.md").read_text()


def made_of(folder, name, heldout, **parts):
    """What is made of the parts of a data set, the rows to train on and those held out."""
    source = downloaded(folder / "downloaded", name, parts)
    made = prepare(name, str(source), folder / "out", heldout=heldout)
    return made, *(lines(folder / "out" / f"{part}.jsonl") for part in ("train", "heldout"))


def test_openr1mm_shows_its_image_before_the_problem_and_keeps_what_is_in_the_tag(tmp_path):
    same = openr1mm_row(1, problem="<image> How wide?")
    rows = [openr1mm_row(1), openr1mm_row(2), same, openr1mm_row(2), openr1mm_row(3, solution="7")]
    made, train, heldout = made_of(tmp_path, "openr1mm", 1, train=rows)
    found, out = train + heldout, tmp_path / "out"
    assert made == Made(3, 1, 1)
    assert sorted(row["answer"] for row in found) == ["1", "1", "2", "7"]
    for row in found:
        assert row["prompt"].startswith("<image>How ") and row["prompt"].count("<image>") == 1
        assert row["prompt"].endswith("between <answer> and </answer>.")
        (image,) = row["images"]
        shade = {"1": 1, "2": 2, "7": 3}[row["answer"]]
        assert (out / image).read_bytes() == png(shade)["bytes"]
    assert len(list((out / "images").iterdir())) == 3, "two problems are about one image"


def test_geometry3k_keeps_its_test_part(tmp_path):
    parts = {
        "train": [geometry3k_row(1), geometry3k_row(2)], "validation": [geometry3k_row(3)],
        "test": [geometry3k_row(2), geometry3k_row(4)],
    }  # fmt: skip
    made, train, heldout = made_of(tmp_path, "geometry3k", 1, **parts)
    assert made == Made(2, 2, 1)
    assert {row["answer"] for row in train} == {"\\frac{1}{2}", "\\frac{3}{2}"}
    assert {row["answer"] for row in heldout} == {"\\frac{2}{2}", "\\frac{4}{2}"}
    assert train[0]["prompt"].startswith("<image>Find $x$.\n\nThink step by step")


def test_avqa_shows_image_and_sound_with_choices_and_keeps_its_valid_part(tmp_path):
    parts = {"train": [avqa_row(0), avqa_row(1), avqa_row(0)], "valid": [avqa_row(2)]}
    made, train, (heldout,) = made_of(tmp_path, "avqa", 9, **parts)
    assert made == Made(2, 1, 1)
    out = tmp_path / "out"
    assert [row["answer"] for row in train] == ["A", "B"] and heldout["answer"] == "C"
    assert train[0]["prompt"].startswith(
        "<image><audio>What makes the sound?\nA. a dog\nB. a train\nC. rain\nD. a bell\n\nLook and"
    )
    (image,), (sound,) = train[1]["images"], train[1]["audios"]
    assert (out / image).read_bytes() == png(1)["bytes"] and image.endswith(".png")
    assert (out / sound).read_bytes() == tone(0.6) and sound.endswith(".wav")
    assert len(list((out / "audios").iterdir())) == 3


def test_nextqa_links_its_videos_and_holds_some_prompts_out(tmp_path):
    made, train, heldout = made_of(tmp_path, "nextqa", 1, train=[*map(nextqa_row, range(4))])
    assert made == Made(3, 1, 0)
    assert sorted(row["answer"] for row in train + heldout) == ["A", "B", "C", "D"]
    for row in train + heldout:
        assert row["prompt"].startswith("<video>why did the boy fall?\nA. ice\n")
        (video,) = row["videos"]
        given = tmp_path / "downloaded" / "NextQA" / f"{'ABCD'.index(row['answer'])}.mp4"
        assert (tmp_path / "out" / video).samefile(given)


BAD = {
    "no such sound": ("avqa", {"path": {"image": "images/1.png", "audio": "x.wav"}},
                      "path.audio = 'x.wav': there is no such file beside the rows"),
    "a file elsewhere": ("nextqa", {"video_filename": "../x.mp4"}, "is outside of the folder"),
    "an image for a sound": ("avqa", {"path": {"image": "images/1.png", "audio": "images/1.png"}},
                             "a file of audio is PNG; WAV"),
    "two places": ("geometry3k", {"problem": "<image><image>?"}, "problem has 2 places <image>, "
                   "and there are 1 images"),
    "an animation": ("openr1mm", {"image": png(1, "GIF")}, "an image is GIF; JPEG"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_none_of_the_data_set_is_named_and_nothing_is_written(tmp_path, case):
    name, fields, said = BAD[case]
    source = downloaded(tmp_path / "downloaded", name, {"train": [ROWS[name](1, **fields)]})
    with pytest.raises(ConfigError) as refused:
        prepare(name, str(source), tmp_path / "out", heldout=1)
    assert said in str(refused.value) and "hf download" not in str(refused.value).split(";")[0]
    where = {"avqa": "omni_rl_format_train.json, row 0", "nextqa": "nextqa_0-30s.jsonl, line 1"}
    assert where.get(name, "train-00000-of-00001.parquet, row 0") in str(refused.value)
    assert not (tmp_path / "out").exists()
