"""`relax-hpc check --decode` finds what headers do not tell, and `submit` leaves it out."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadly import Deadly
from media_files import lines, model_folder, photo, tokenizer, write_lines
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.config import job_file
from relax_hpc.data.records import Records
from relax_hpc.data.rows import TaskShare
from relax_hpc.errors import ConfigError
from relax_hpc.launch import submit
from relax_hpc.roles.rollout import prompt_check, row_gate
from relax_hpc.roles.rollout.row_gate import RowGate
from relax_hpc.runtime.paths import RunPaths

JOB = Path(__file__).parents[3] / "jobs/tiny/arithmetic.toml"


@pytest.fixture
def check(tmp_path):
    """A job of four photos, the third cut short behind its header."""
    for number in range(4):
        data = photo(64, 96, "JPEG", seed=number)
        (tmp_path / f"{number}.jpg").write_bytes(data[: len(data) // 2] if number == 2 else data)
    rows = [{"prompt": "<image>?", "images": f"{n}.jpg", "answer": "1"} for n in range(4)]
    settings = {
        "model.path": model_folder(tmp_path / "model", "qwen3_vl"),
        "prompts.train": write_lines(tmp_path / "train.jsonl", rows),
        "eval.heldout.path": write_lines(tmp_path / "heldout.jsonl", rows[:1]),
    }

    def run(**more):
        given = [f"--set={key}={value}" for key, value in (settings | more).items()]
        done = CliRunner().invoke(app, ["check", str(JOB), "--local", "--decode", *given])
        return f"{done.output}{done.exception}"

    run.settings = settings
    return run


@pytest.fixture
def config(check, tmp_path, monkeypatch):
    """The same job with SGLang and these settings, read."""
    shape = SimpleNamespace(max_positions=4096, vocab_size=2**20)
    monkeypatch.setattr(prompt_check, "read_architecture", lambda _: shape)
    always = {"engines.rollout.kind": "sglang", "run_root": tmp_path / "runs"}

    def read(**more):
        settings = check.settings | always | more
        return job_file.load(JOB, [f"{key}={value}" for key, value in settings.items()])

    return read


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
def test_a_photo_whose_header_ends_its_process_is_named_by_a_plain_check(config, tmp_path, broken):
    config = config(**{"prompts.media.advanced.broken": broken})
    sources = prompt_check.sources_of(config, prompt_check.read(config), tokenizer())
    line = f"{tmp_path}/train.jsonl, line 2: image 1 (1.jpg): ends the process that decodes it"
    if broken == "error":
        with pytest.raises(ConfigError) as caught:
            prompt_check.check_sample(config, sources)
        said = str(caught.value)
    else:
        [said] = prompt_check.check_sample(config, sources)
        assert "1 of 4 rows that were looked at cannot be used and are left out" in said
    assert line in said and "\n" not in said


@pytest.fixture
def skipping(config, tmp_path):
    """The same job, which skips broken media: row 0 names a URL, the header of row 2 is whole."""
    rows = (tmp_path / "train.jsonl").read_text().replace('"0.jpg"', '"https://x.org/0.jpg"')
    (tmp_path / "train.jsonl").write_text(rows)
    config = config(
        **{"prompts.media.advanced.broken": "skip", "prompts.media.advanced.workers": 1}
    )
    return SimpleNamespace(config=config, paths=RunPaths(tmp_path / "run"))


def decided(skipping, *, say=lambda _: None, advance=lambda *_: None):
    skipping.paths.control.mkdir(parents=True, exist_ok=True)
    row_gate.decide_media_once(skipping.config, skipping.paths, say=say, advance=advance)


def settled(skipping, number=0, size=1):
    """The training prompts of a task once it has looked at its rows."""
    files = prompt_check.open_files(skipping.config)
    sources = prompt_check.sources_of(skipping.config, files, tokenizer())
    RowGate(skipping.config, skipping.paths, sources, TaskShare(number, size)).settle()
    return sources.train


def listed(paths):
    """Sets and numbers of the rows that are left out."""
    return [(each["set"], each["row"]) for each in lines(paths.left_out)]


OUT = [("prompts.train", 0), ("prompts.train", 2)]


def test_rows_are_left_out_as_submission_decided_by_all_tasks_at_all_starts(
    skipping, tmp_path, monkeypatch
):
    said, seen = [], []
    decided(skipping, say=said.append, advance=lambda *given: seen.append(given))
    assert "the media of 5 rows are decoded before anything is started" in said[0]
    assert said[1].startswith("prompts.train: 2 of 4 rows are left out; the first: ")
    assert said[2].startswith("decoded 5 media in ")
    assert (seen[0], seen[-1]) == ((0, 5), (5, 5)) and seen == sorted(seen)
    assert listed(skipping.paths) == OUT
    before = lines(skipping.paths.left_out)
    assert "line 1: image 1: is 'https://x.org/0.jpg'; a job" in before[0]["reason"]
    assert "line 3: image 1 (2.jpg): is JPEG that cannot be decoded" in before[1]["reason"]
    monkeypatch.setattr(row_gate, "decode", None)  # nobody decodes again
    (tmp_path / "2.jpg").write_bytes(photo(64, 96, "JPEG"))  # and nobody decides again
    for number in range(2):
        source = settled(skipping, number, 2)
        assert sorted(source[n].index for n in range(2)) == [1, 3]
    decided(skipping)
    assert lines(skipping.paths.left_out) == before


def test_a_medium_that_breaks_after_submission_ends_the_task_by_name(skipping, tmp_path):
    decided(skipping)
    (tmp_path / "3.jpg").unlink()
    with pytest.raises(ConfigError) as caught:
        settled(skipping)
    assert "train.jsonl, line 4: image 1: " in str(caught.value)
    assert "3.jpg: no such file" in str(caught.value)
    assert "(it could be used when the run was submitted)" in str(caught.value)


def test_another_preprocessor_is_looked_at_again_and_another_number_of_rows_refused(
    skipping, tmp_path, monkeypatch
):
    decided(skipping)
    settled(skipping)
    monkeypatch.delattr(prompt_check.PromptSource, "examine")
    settled(skipping)
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(file.read_text().replace("65536", "65537"))
    with pytest.raises(AttributeError):
        settled(skipping)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "?", "answer": "1"}) + "\n")
    (skipping.paths.prompt_rows(0)).unlink()
    with pytest.raises(ConfigError, match="has 5 rows, the run was submitted with 4; restore the"):
        settled(skipping)


def test_without_a_decision_a_task_looks_at_nothing(skipping):
    with pytest.raises(ConfigError, match=r"broken-media\.json: does not say which rows prompt"):
        settled(skipping)


def test_data_of_nothing_but_broken_media_are_refused(skipping, tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(b"no photo")
    with pytest.raises(ConfigError, match=r"^prompts.train: no row can be used; the first: .*ne 1"):
        decided(skipping)
    assert not skipping.paths.broken_media.exists()


def test_submit_decides_before_it_starts_anything(skipping, monkeypatch):
    found = []
    monkeypatch.setattr(submit.preflight, "check", lambda config, *_, **__: config)
    monkeypatch.setattr(submit, "start", lambda planned, _, paths, *__: found.append(listed(paths)))
    submit.submit(skipping.config, local=True)
    assert found == [OUT]


def test_a_model_that_does_not_hear_is_shown_no_sound(check, tmp_path):
    rows = lines(tmp_path / "train.jsonl")
    rows[3] = {"prompt": "<audio>?", "audios": "3.jpg", "answer": "1"}
    write_lines(tmp_path / "train.jsonl", rows)
    said = check()
    assert "line 4: audio 1 (3.jpg): is audio, which qwen3_vl does not take; it takes im" in said
