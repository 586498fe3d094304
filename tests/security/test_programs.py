"""S3: what a program imports from where it was runs only if nobody else can have written it."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
from adversary import as_user, needs_another_user

from relax_hpc.config import programs
from relax_hpc.config.job_file import validate
from relax_hpc.launch import preflight
from relax_hpc.runtime.files import user_programs

MINE, THEIRS, GROUP = 4201, 4202, 4203
REWARD = """\
import helper
try:
    import fast_edit_distance
    found = True
except ImportError:
    found = False
try:
    import pack
    packed = pack.VALUE
except ImportError as error:
    packed = str(error)

class Environment:
    async def rollout(self, prompt, session):
        return None

def score(sample):
    return helper.VALUE
"""


@pytest.fixture
def place():
    """A folder of a group, with a program of mine, its copy as a run has it, and a mark."""
    needs_another_user()
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        root = Path(name)
        root.chmod(0o777 | 0o1000)
        (root / "mine" / "pack").mkdir(parents=True)
        (root / "mine" / "reward.py").write_text(REWARD)
        (root / "mine" / "helper.py").write_text("VALUE = 1.0\n")
        (root / "mine" / "pack" / "__init__.py").write_text("from pack.part import VALUE\n")
        (root / "mine" / "pack" / "part.py").write_text("VALUE = 2.0\n")
        tree = {"name": "run", "run_root": str(root), "model": {"path": "m"},
                "prompts": {"train": "t"}, "schedule": {"num_steps": 9},
                "reward": {"name": f"{root}/mine/reward.py:score"}}  # fmt: skip
        kept = programs.keep(validate(tree, source="test"), root / "programs")
        for path in (root / "mine", *(root / "mine").rglob("*"), *(root / "programs").rglob("*")):
            os.chown(path, MINE, GROUP)
        os.chown(root / "programs", MINE, MINE)
        yield root, kept.reward.name


def as_mine(copy):
    """Imports the copy as a task of mine does; returns what it found."""

    def run():
        module = sys.modules[user_programs.import_place(copy).__module__]
        print(module.found, module.packed, module.helper.VALUE)

    return as_user(MINE, run, groups=[GROUP])


def planted(root, mode):
    """Makes the folder as open as the mode says, and has another user plant what it looks for."""
    (root / "mine").chmod(mode)
    text = f"open({str(root / 'executed')!r}, 'w').close()\n"
    return as_user(
        THEIRS,
        lambda: (root / "mine" / "fast_edit_distance.py").write_text(text),
        groups=[GROUP], umask=0o002,
    )[0]  # fmt: skip


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o1777])
def test_a_module_that_others_put_beside_a_program_is_not_imported(place, mode):
    root, copy = place
    assert planted(root, mode) == 0
    code, said = as_mine(copy)
    assert (code, said.split()[0]) == (0, "False"), said
    advice = "and others may have put there what would run as you; chmod -R go-w"
    assert (advice in said) == (mode != 0o1777), "what is mine cannot be replaced there"
    assert not (root / "executed").exists()


def test_a_package_of_mine_is_imported_from_where_it_is(place):
    root, copy = place
    assert as_mine(copy) == (0, "False 2.0 1.0\n")
    (root / "mine" / "helper.py").write_text("raise 1\n")  # the run has its copy
    assert as_mine(copy) == (0, "False 2.0 1.0\n")


@pytest.mark.parametrize("opened", ["pack", "pack/part.py", "pack/__init__.py", "."])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_package_of_which_others_may_write_a_part_is_not_imported(place, opened, mode):
    root, copy = place
    path = root / "mine" / opened
    path.chmod(path.stat().st_mode & 0o777 | mode)
    code, said = as_mine(copy)
    assert (code, said.split()[0]) == (0, "False") and f"{path.resolve()} has mode" in said


def test_a_folder_that_another_user_put_in_the_place_of_mine_is_not_imported_from(place):
    root, copy = place
    root.chmod(0o777)  # no sticky bit
    as_user(THEIRS, lambda: (root / "mine").rename(root / "gone"))
    as_user(THEIRS, lambda: (root / "mine").mkdir() or (root / "mine" / "pack.py").write_text(
        f"VALUE = open({str(root / 'executed')!r}, 'w').close()\n"), umask=0o022)  # fmt: skip
    code, said = as_mine(copy)
    assert code == 0 and f"{root} has mode 0777" in said and not (root / "executed").exists()


def test_a_module_by_its_name_is_looked_at_too(place, monkeypatch):
    root, _ = place
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # `python -c` has ""

    def run():
        os.chdir(root / "mine")
        print(user_programs.import_place("pack:VALUE"))

    assert as_user(MINE, run, groups=[GROUP]) == (0, "2.0\n")
    (root / "mine" / "pack").chmod(0o775)

    def refused():
        try:
            run()
        except ModuleNotFoundError as error:
            print(error)

    assert "module pack in" in as_user(MINE, refused, groups=[GROUP])[1]


def test_check_names_programs_and_commands_that_others_may_write(place, monkeypatch):
    root, _ = place
    agent = root / "mine" / "agent.sh"
    agent.touch(0o700)
    tree = {"name": "run", "run_root": str(root), "model": {"path": "m"},
            "prompts": {"train": "t"}, "schedule": {"num_steps": 9},
            "reward": {"name": f"{root}/mine/reward.py:score"},
            "notify": {"command": ["sh", str(agent)]}}  # fmt: skip
    for path in (root / "mine").rglob("*"):
        os.chown(path, 0, 0)
    os.chown(root / "mine", 0, GROUP)
    config, said = validate(tree, source="test"), []
    preflight.tell_of_programs(config, said.append)
    assert said == []
    (root / "mine").chmod(0o2775)
    preflight.tell_of_programs(config, said.append)
    assert [line.split(": ")[0] for line in said] == [f"{root}/mine/reward.py", "notify.command"]
    assert all("mine has mode 2775, so others may write what runs as you" in line for line in said)
