"""What `relax-hpc check` prints on a terminal, and what into a file."""

import json
import sys
from pathlib import Path

import pytest

from relax_hpc.cli import main
from relax_hpc.errors import ConfigError

NEXT = "nothing is wrong; next: relax-hpc submit job.toml"


@pytest.fixture
def check(job, monkeypatch, capsys):
    """Runs `check`; what a terminal shows, or what comes out beside what is said."""
    Path("heldout.jsonl").write_text(Path("train.jsonl").read_text())  # there is a remark on it

    def run(*arguments, terminal):
        with monkeypatch.context() as patch:
            if terminal:
                patch.setattr(sys.stdout, "isatty", lambda: True)
                patch.setattr(sys, "stderr", sys.stdout)
            main.app(["check", "job.toml", "--local", *arguments], standalone_mode=False)
        return capsys.readouterr()

    return run


def test_a_terminal_shows_remarks_and_then_what_comes_next(check, monkeypatch):
    monkeypatch.setattr(main, "decode_media", lambda _, say: say("decoded 7 media"))
    shown = check("--set", "reward.args={ }", "--decode", terminal=True).out.splitlines()
    assert shown[0] == "decoded 7 media"
    assert any("are trained on" in line for line in shown[1:-1])
    assert not any(line.startswith("{") for line in shown)
    assert shown[-1] == f"{NEXT} --local --set 'reward.args={{ }}'"


def test_all_settings_are_shown_above_remarks(check):
    shown = check("--all", terminal=True).out
    settings, found, remarks = shown.rpartition("\n}\n")
    assert json.loads(settings + found)["name"] == "run"
    assert "are trained on" in remarks and remarks.endswith(f"{NEXT} --local\n")


def test_a_file_gets_settings_and_nothing_else(check):
    output, said = check(terminal=False)
    assert json.loads(output)["name"] == "run"
    assert "are trained on" in said and said.endswith(f"{NEXT} --local\n")


def test_where_kernels_are_kept_is_said_and_a_place_of_others_is_refused(check, tmp_path):
    asked = ("--set", "launch.kernel_cache=kernels")
    output, said = check(*asked, terminal=False)
    assert json.loads(output)["launch"]["kernel_cache"] == str(Path("kernels").absolute())
    assert f"kernels: are kept in {Path('kernels').absolute()}, those of" in said
    assert not Path("kernels").exists(), "a task makes it"
    Path("kernels").mkdir()
    Path("kernels").chmod(0o777)
    with pytest.raises(ConfigError, match=r"launch\.kernel_cache = .*mode 0777: others may write"):
        check(*asked, terminal=False)


def test_what_submit_would_refuse_for_want_of_a_package_is_not_called_right(check):
    said = check("--set", "engines.rollout.kind=sglang", terminal=False).err.splitlines()
    assert "has no sglang; install sglang into that environment" in said[-2]
    assert said[-1].startswith("nothing else is wrong; where that is there: relax-hpc submit job")


@pytest.mark.parametrize(("steps", "is_said"), [(9, True), (10, False)])
def test_a_warm_up_that_is_longer_than_the_run_is_told_of(check, steps, is_said):
    asked = ("actor.optimizer.warmup_steps=10", f"schedule.num_steps={steps}")
    asked = ("actor.optimizer.lr=1e-5", *asked)
    said = check(*(word for each in asked for word in ("--set", each)), terminal=False).err
    told = "learns in 9 steps, so the learning rate rises to 9e-06 only, not to 1e-05\n"
    assert (told in said, "rises" in said) == (is_said, is_said)


def test_a_name_in_use_is_said_after_all_else(check, capsys):
    Path("runs/run").mkdir(parents=True)
    with pytest.raises(Exception, match="say --set name=run-2"):
        check(terminal=False)
    assert "are trained on" in capsys.readouterr().err
