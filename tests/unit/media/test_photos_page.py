"""The section of docs/media.md for photos of one's own, as its reader follows it."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.demo import seeing

PAGE = (Path(__file__).parents[3] / "docs" / "media.md").read_text()
SECTION = PAGE.partition("## Photos of your own")[2].partition("\n## ")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the reader has before: fifty photos, ten further ones, and a model."""
    monkeypatch.chdir(tmp_path)
    tokens = seeing.tokenizer()
    made = tmp_path / "models" / "Qwen3-VL-4B-Instruct"
    seeing.save(made, seeing.model("vl", tokens, seed=0), tokens)
    (tmp_path / "photos").mkdir()
    random = np.random.default_rng(0)
    [line] = re.findall(r"^```json\n(.*)\n```", SECTION, re.MULTILINE)
    rows = []
    for number in range(60):
        pixels = random.integers(0, 256, (90, 120, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:04}.jpg")
        rows.append(line.replace("0001", f"{number:04}"))
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:50]))
    (tmp_path / "heldout.jsonl").write_text("\n".join(rows[50:]))
    [job] = re.findall(r"^```toml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    (tmp_path / "photos.toml").write_text(job)
    return tmp_path


def test_the_job_of_the_page_passes_check_and_a_broken_photo_is_named(folder):
    [check, *_] = re.findall(r"^relax-hpc (check .*?) +#", SECTION, re.MULTILINE)
    arguments = [*check.split(), "--local"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, f"{answer.output}\n{answer.exception!r}"
    assert "prompts are" not in answer.output, "one question about fifty photos is fifty prompts"
    photo = folder / "photos" / "0007.jpg"
    photo.write_bytes(photo.read_bytes()[:700])
    answer = CliRunner().invoke(app, arguments)
    assert "train.jsonl, line 8: image 1 (photos/0007.jpg)" in str(answer.exception)
