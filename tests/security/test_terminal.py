"""S6, S8: a model's folder runs no code and asks nothing; nothing that others wrote acts on a
terminal."""

import io
import json
import logging
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from relax_hpc.cli import main as cli
from relax_hpc.cli.demo import models
from relax_hpc.cli.lines import echo
from relax_hpc.data import tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.runs import screen
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.scratch import COMPILED

BAD = "\x1b]0;OWNED\x07\x1b[2J\x9b2J"
CODE = "from pathlib import Path\nPath({!r}).touch()\nclass Mine: pass\n"


@pytest.mark.parametrize("kind", ["config", "tokenizer", "both"])
def test_a_folder_of_a_model_runs_no_code_and_asks_nothing(tmp_path, monkeypatch, capfd, kind):
    """S6: whatever stands in config.json and tokenizer_config.json, and somebody says yes."""
    models.tokenizer().save_pretrained(tmp_path)
    mark = tmp_path / "executed"
    for name in ("mine", "config_mine"):
        (tmp_path / f"{name}.py").write_text(CODE.format(str(mark)))
    config = {"model_type": "unknown" if kind != "tokenizer" else "qwen3"}
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if kind != "tokenizer":
        config["auto_map"] = {"AutoConfig": "config_mine.Mine"}
        said.pop("tokenizer_class", None)
    if kind != "config":
        said |= {
            "tokenizer_class": "Mine",
            "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]},
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    with suppress(ConfigError):  # or it loads by what of it is known
        tokenizer.load(tmp_path)
    assert not mark.exists()
    out, err = capfd.readouterr()
    assert "[y/N]" not in out + err and sys.stdin.read() == "y\ny\ny\n", "nobody was asked"


def test_every_tokenizer_is_read_without_the_code_of_its_folder():
    """S6: nobody leaves the word to a default, nor to who sits at the terminal."""
    package = Path(cli.__file__).parents[1]
    found = [
        f"{path.relative_to(package)}: {call}"
        for path in package.rglob("*.py")
        for call in re.findall(r"\.from_pretrained\((?:[^()]|\([^()]*\))*\)", path.read_text())
        if "trust_remote_code=False" not in call
    ]
    assert found == []


@pytest.mark.parametrize("raised", [ConfigError(f"{BAD}: no"), PermissionError(13, "no", BAD),
                                    ValueError(BAD)])  # fmt: skip
def test_an_error_does_not_act_on_the_terminal(monkeypatch, capfd, raised):
    """S8: what we raise on purpose, what the system refuses, and a mistake of ours."""

    def app(**_):
        logging.getLogger("any").warning("%s: is odd", BAD)
        raise raised

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit):
        cli.main()
    said = capfd.readouterr().err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said) and said


def test_a_path_does_not_act_on_the_terminal(tmp_path, monkeypatch, capfd):
    """S8: as arguments that a shell completes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{BAD}.toml").write_text("name = 5\n")
    for words in (
        ["check", f"{BAD}.toml"], ["view", BAD], ["check", BAD], ["bus", "show", BAD + ".h5"],
        ["keys", BAD], ["schema", "--out", f"{BAD}/x"], [BAD], ["view", f"--{BAD}"],
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["relax-hpc", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = "".join(capfd.readouterr())
        assert end.value.code == 2 and said, words
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said), words


def test_all_that_commands_print_goes_through_one_function(capsys):
    """S8: it shows a picture in place of what would act."""
    echo(f"a\tline\n{BAD}")
    said = capsys.readouterr().out
    assert said.startswith("a\tline\n") and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
    found = r"(typer|click)\.s?echo|(?<![.\w])print\(|std(out|err)\.write"
    folder = Path(cli.__file__).parent
    others = {path.name for path in folder.glob("*.py") if re.search(found, path.read_text())}
    assert others == {"lines.py"}


def test_names_and_nodes_do_not_act_on_the_screen_of_watch():
    """S8: nor are they taken for markup."""
    odd = SimpleNamespace(
        name=f"[red]{BAD}", state=BAD, finished_tasks=1, tasks=2, nodes=BAD, id=BAD, node=BAD,
        version=3, weights=BAD, start="",
    )  # fmt: skip
    progress = {"steps_done": 1, "num_steps": 2, "eta_s": None}
    run = SimpleNamespace(name=BAD, state="RUNNING", progress=progress, components=[odd])
    out = io.StringIO()
    console = Console(file=out, width=200)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_results", "_facts"):
            patched.setattr(screen, name, lambda _: [BAD])
        console.print(screen._head(run), screen._components(run))
        console.print(screen._engines(SimpleNamespace(engines=[odd]), []))
    said = out.getvalue()
    assert "[red]" in said and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_every_command_has_torch_compile_in_a_folder_of_the_users(tmp_path, monkeypatch, umask):
    """S10: torch's own name in the temporary folder is one that others can take first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(COMPILED, str(tmp_path / "torchinductor_me"))  # what it is set to is undone
    found = []
    monkeypatch.setattr(cli, "app", lambda **_: found.append(os.environ[COMPILED]))
    with permissions.set_umask(umask):
        cli.main()
    assert found == [str(tmp_path / f"relax-compiled-{os.geteuid()}")]
    assert Path(found[0]).stat().st_mode & 0o777 == 0o700
