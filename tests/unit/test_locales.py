"""Whatever the locale, and whatever bytes names have: text is UTF-8, and printing never fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.config.job_file import load
from relax_hpc.errors import ConfigError
from relax_hpc.launch import interpreter
from relax_hpc.sections import Resources

CHINESE, EMOJI = "\u4e2d\u6587", "\U0001f642"


@pytest.fixture(scope="module")
def locales(tmp_path_factory):
    """Variables under which Python takes text for GBK, if that can be made here."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("localedef: not installed")
    made = ["localedef", "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")]
    subprocess.run(made, capture_output=True)
    variables = os.environ | {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK"}
    variables.pop("PYTHONUTF8", None)
    ask = [sys.executable, "-c", "import sys; print(sys.getfilesystemencoding())"]
    if subprocess.run(ask, capture_output=True, env=variables).stdout.strip() != b"gbk":
        pytest.skip("no locale of GBK can be made here")
    return variables


def run(arguments, folder, variables):
    command = [sys.executable, "-m", "relax_hpc", *arguments]
    return subprocess.run(command, capture_output=True, cwd=folder, env=variables, timeout=120)


@pytest.mark.long
def test_prepare_writes_utf_8_and_prints_what_the_locale_lacks(tmp_path, locales):  # O7
    rows = [{"question": f"{CHINESE} {EMOJI} {n}?", "answer": f"#### {n}"} for n in range(6)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "src.jsonl").write_text(lines, encoding="utf-8")
    out = f"o-{CHINESE}-{EMOJI}"
    command = ["prepare", "gsm8k", "--from", "src.jsonl", "--out", out, "--heldout", "2"]
    answer = run(command, tmp_path, locales)
    assert answer.returncode == 0, answer.stderr
    said = f"o-{CHINESE}-\\U0001f642: 4 prompts"
    assert said.encode("gbk") in answer.stdout + answer.stderr
    text = b"".join(
        (tmp_path / out / f"{name}.jsonl").read_bytes() for name in ("train", "heldout")
    )
    assert text.decode().count(f"{CHINESE} {EMOJI}") == 6


def test_a_folder_whose_name_is_no_text_is_refused_in_a_line(refused, job, tmp_path):  # O1
    odd = Path(os.fsdecode(b"r\xe9sum\xe9"))
    odd.mkdir()
    try:
        shutil.copy("job.toml", odd)
        os.chdir(odd)
        said = refused("check", "job.toml", "--local")
    finally:
        os.chdir(tmp_path)
    assert "r\\udce9sum\\udce9: its name is no UTF-8 text" in said and "\n" not in said
    with pytest.raises(ConfigError, match=r"--set run_root=.*UTF-8 text"):
        load(Path("job.toml"), [f"run_root={odd}"])


def test_an_interpreter_may_greet_before_it_answers(tmp_path):  # O1
    greeting = r"printf 'Bienvenue sur le r\351seau\n{\"a\": 1}\n'; printf '\351' >&2"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n{greeting}\n{sys.executable} "$@"; {greeting}\n')
    python.chmod(0o755)
    said = []
    resources = Resources(python=str(python))
    interpreter.check("actor", resources, use_slurm=True, say=said.append, packages=["torch"])
    assert said == []
    with pytest.raises(ConfigError, match="has no nowhere"):
        interpreter.check("actor", resources, use_slurm=True, say=said.append, packages=["nowhere"])
