"""`relax-hpc check --decode` finds what headers do not tell."""

import json
from pathlib import Path

import pytest
from media_files import model_folder, photo, recipe_of, source
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.media.canonical import measured

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

    return run


def test_a_photo_that_ends_early_is_named_with_its_line(check, tmp_path):
    recipe = recipe_of(tmp_path, "qwen3_vl")
    measured(source((tmp_path / "2.jpg").read_bytes()), recipe)  # its header is whole
    said = check()
    assert "1 of 5 media cannot be used\n" in said
    assert f"{tmp_path}/train.jsonl, line 3: image 1 (2.jpg): is JPEG that cannot be deco" in said
    assert 'set prompts.bad_rows = "skip"' in said


def test_where_bad_rows_are_skipped_it_is_only_told(check):
    said = check(**{"prompts.bad_rows": "skip"})
    assert "1 of 5 media cannot be used\n" in said and "are left out" in said


def test_all_are_counted_where_each_can_be_used(check, tmp_path):
    (tmp_path / "2.jpg").write_bytes(photo(64, 96, "JPEG"))
    assert "decoded 5 media: each can be used" in check()
