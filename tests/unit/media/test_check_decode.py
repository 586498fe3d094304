"""`relax-hpc check --decode` finds what headers do not tell."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from bad_media import CASES
from deadly import Deadly
from media_files import model_folder, photo, recipe_of, source, tokenizer
from typer.testing import CliRunner

from relax_hpc import job_file
from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import measured
from relax_hpc.paths import RunPaths
from relax_hpc.prompts.records import Records
from relax_hpc.roles.rollout import decode_check, prompt_check, row_check

TEMPLATE = (
    "{%- for m in messages %}{{- m.role }}{%- if m.content is string %}{{- m.content }}"
    "{%- else %}{%- for c in m.content %}{%- if c.type == 'image' %}{{- '<|image_pad|>' }}"
    "{%- else %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"
)

JOB = Path(__file__).parents[3] / "jobs/tiny/arithmetic.toml"


@pytest.fixture
def check(tmp_path):
    """A job of four photos, the third cut short behind its header."""
    for number in range(4):
        data = photo(64, 96, "JPEG", seed=number)
        (tmp_path / f"{number}.jpg").write_bytes(data[: len(data) // 2] if number == 2 else data)
    rows = [{"prompt": "<image>?", "images": f"{n}.jpg", "answer": "1"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "heldout.jsonl").write_text(json.dumps(rows[0]) + "\n")
    settings = {
        "model.path": model_folder(tmp_path / "model", "qwen3_vl"),
        "prompts.train": tmp_path / "train.jsonl",
        "eval.heldout.path": tmp_path / "heldout.jsonl",
    }

    def run(**more):
        given = [f"--set={key}={value}" for key, value in (settings | more).items()]
        done = CliRunner().invoke(app, ["check", str(JOB), "--local", "--decode", *given])
        return f"{done.output}{done.exception}"

    run.settings = settings
    return run


def test_a_photo_that_ends_early_is_named_with_its_line(check, tmp_path):
    recipe = recipe_of(tmp_path, "qwen3_vl")
    measured(source((tmp_path / "2.jpg").read_bytes()), recipe)  # its header is whole
    said = check()
    assert "1 of 5 media cannot be used\n" in said
    assert f"{tmp_path}/train.jsonl, line 3: image 1 (2.jpg): is JPEG that cannot be deco" in said
    assert 'set prompts.media.broken = "skip"' in said


@pytest.fixture
def deadly(monkeypatch):
    """The photo of the second line ends every process that opens it."""
    read = Records.__getitem__

    def row(records, index):
        record = read(records, index)
        media = (Deadly(*each) if each.given == "1.jpg" else each for each in record.media)
        return record._replace(media=tuple(media))

    monkeypatch.setattr(Records, "__getitem__", row)


@pytest.mark.usefixtures("deadly")
def test_a_photo_that_ends_its_decoder_is_named_with_its_line(check, tmp_path):
    """Beside one that is cut short, which is found as well."""
    said = check()
    assert "2 of 5 media cannot be used\n" in said
    assert f"{tmp_path}/train.jsonl, line 2: image 1 (1.jpg): ends the process that deco" in said
    assert f"{tmp_path}/train.jsonl, line 3: image 1 (2.jpg): is JPEG that cannot be deco" in said


@pytest.mark.usefixtures("deadly")
@pytest.mark.parametrize("broken", ["error", "skip"])
def test_a_photo_whose_header_ends_its_process_is_named_by_a_plain_check(
    check, tmp_path, monkeypatch, broken
):
    settings = check.settings | {
        "prompts.media.broken": broken,
        "engines.rollout.kind": "sglang",
    }
    config = job_file.load(JOB, [f"{key}={value}" for key, value in settings.items()])
    shape = SimpleNamespace(max_positions=4096)
    monkeypatch.setattr(prompt_check, "read_architecture", lambda _: shape)
    tokens = tokenizer()
    tokens.chat_template = TEMPLATE
    sources = prompt_check.sources_of(config, prompt_check.read(config), tokens)
    line = f"{tmp_path}/train.jsonl, line 2: image 1 (1.jpg): ends the process that decodes it"
    if broken == "error":
        with pytest.raises(ConfigError) as caught:
            prompt_check.check_sample(config, sources)
        said = str(caught.value)
    else:
        [said] = prompt_check.check_sample(config, sources)
        assert "1 of 4 rows that were looked at cannot be used and are left out" in said
    assert line in said and "\n" not in said


def test_where_broken_media_are_skipped_it_is_only_told(check):
    said = check(**{"prompts.media.broken": "skip"})
    assert "1 of 5 media cannot be used\n" in said and "are left out" in said


def test_all_are_counted_where_each_can_be_used(check, tmp_path):
    (tmp_path / "2.jpg").write_bytes(photo(64, 96, "JPEG"))
    assert "decoded 5 media: each can be used" in check()


def test_rows_are_left_out_by_decoding_once_for_all_tasks(check, tmp_path, monkeypatch):
    """The header of the third photo is whole; row 0 names a file that is not there."""
    rows = (tmp_path / "train.jsonl").read_text().replace('"0.jpg"', '"gone.jpg"')
    (tmp_path / "train.jsonl").write_text(rows)
    settings = check.settings | {
        "prompts.media.broken": "skip",
        "prompts.media.workers": 1,
        "engines.rollout.kind": "sglang",
    }
    config = job_file.load(JOB, [f"{key}={value}" for key, value in settings.items()])
    shape = SimpleNamespace(max_positions=4096)
    monkeypatch.setattr(prompt_check, "read_architecture", lambda _: shape)
    tokens, paths = tokenizer(), RunPaths(tmp_path / "run")
    tokens.chat_template = TEMPLATE
    every = []

    def settle(number):
        sources = prompt_check.sources_of(config, prompt_check.open_files(config), tokens)
        every.append(sources.train)
        row_check.settle(config, paths, sources, row_check.Share(number, 2))

    tasks = [threading.Thread(target=settle, args=[number]) for number in range(2)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert [sorted(source[n].index for n in range(2)) for source in every] == [[1, 3], [1, 3]]
    listed = [json.loads(line) for line in paths.left_out.read_text().splitlines()]
    assert [(each["set"], each["row"]) for each in listed] == [
        ("prompts.train", 0),
        ("prompts.train", 2),
    ]
    assert "line 1: image 1: " in listed[0]["reason"] and "gone.jpg" in listed[0]["reason"]
    assert "line 3: image 1 (2.jpg): is JPEG that cannot be decoded" in listed[1]["reason"]
    monkeypatch.delattr(decode_check, "decoded")  # who starts again does not look
    settle(0)
    (tmp_path / "model" / "preprocessor_config.json").write_text(
        (tmp_path / "model" / "preprocessor_config.json").read_text().replace("65536", "65537")
    )
    with pytest.raises(AttributeError):  # another preprocessor finds other things
        settle(0)


def test_every_medium_that_cannot_be_used_is_a_line_of_its_own_and_the_job_is_refused(
    refused, tmp_path
):
    """All of them in one file, by the command line: exit code 2, and nothing is created."""
    rows = []
    for number, (modality, data, _) in enumerate(CASES.values()):
        (tmp_path / f"{number}.bin").write_bytes(data)
        media = {f"{modality}s": f"{number}.bin"}
        rows.append({"prompt": f"<{modality}>?", "answer": "1"} | media)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = model_folder(tmp_path / "omni", "qwen3_omni_moe")
    settings = {
        "model.path": folder, "prompts.media.audio_max_s": 2, "prompts.media.video_fps": 5,
        "engines.rollout.kind": "sglang",
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in settings.items()]
    config = job_file.load(tmp_path / "job.toml", given)
    found = decode_check.decode(config, lambda *_: None)
    assert (found.num_media, len(found.refused)) == (len(CASES), len(CASES))
    for number, (line, (modality, _, expected)) in enumerate(
        zip(found.refused, CASES.values(), strict=True), start=1
    ):
        start = f"train.jsonl, line {number}: {modality} 1 ({number - 1}.bin): "
        assert line.startswith(start) and "\n" not in line and ";" in line
        assert expected in line
    said = refused("check", "job.toml", "--decode", *(f"--set={each}" for each in given))
    assert f"{len(CASES)} of {len(CASES)} media cannot be used\n" in said
    assert "train.jsonl, line 1: image 1 (0.bin): is empty; replace it" in said
