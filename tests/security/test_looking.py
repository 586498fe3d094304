"""S1: who looks at a run of others, or writes where others may write, writes through none of their
links; who would change a run of others is refused."""

import importlib
import io
import json
import os
import secrets
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
from adversary import as_user, needs_another_user
from bus_fixtures import PRODUCERS, trajectory

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.cli import main as cli
from relax_hpc.cli.demo import models
from relax_hpc.config.job_file import validate
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launch.known_runs import own_run_dir_of
from relax_hpc.runtime.files import permissions, records
from relax_hpc.runtime.files.user_files import write_named
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import picture
from relax_hpc.schema import PromptGroup

MINE, THEIRS, GROUP = 4201, 4202, 4203
"""The user who looks, the one whose run it is, and a group that both are in."""
KEPT = "what I keep\n"
EVENTS = [
    {"event": "step", "step": 1, "time": 10.0, "role": "actor", "rank": 0, "pid": 1,
     "reward/mean": 0.5, "time/step": 5.0, "time/wait": 4.0},
    {"event": "phases", "step": 1, "time": 10.0, "role": "actor", "rank": 0, "pid": 1,
     "phases": [["wait", 5.0, 4.0]]},
]  # fmt: skip
NAMES = ("view.html", "timeline.png", "summary.json", "reward.png", "page.html", "rows.jsonl",
         "rows.parquet", "train.jsonl", "heldout.jsonl", "first.toml", "schema.json")  # fmt: skip


def made_run(root, model):
    """A run of two rows with a step that was timed."""
    tree = {"name": "run", "run_root": str(root.parent), "model": {"path": str(model)},
            "prompts": {"train": "t"}, "schedule": {"num_steps": 1}}  # fmt: skip
    paths = RunPaths(root)
    paths.root.mkdir(parents=True)
    paths.config.write_text(validate(tree, source="test").model_dump_json())
    layout.create(paths.bus, PRODUCERS, {}, sidecar_writers={"advantages-0": "advantages"})
    rows = [trajectory(0, n)._replace(token_ids=np.arange(7, dtype=np.int32)) for n in range(2)]
    with Producer(paths.bus, PRODUCERS[0], {}) as opened:
        opened.put([PromptGroup(0, rows)])
    paths.events_folder.mkdir(parents=True)
    lines = "".join(f"{json.dumps(each)}\n" for each in EVENTS)
    paths.events("actor", 0).write_text(lines)
    return paths


def give(folder, user, mode):
    """Gives a tree to a user, with that mode for every folder, as `chmod -R` makes it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, GROUP)
        path.chmod(mode if path.is_dir() else mode & 0o666)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="relax-test-model-"))
    folder.chmod(0o755)
    models.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


class Place:
    """A home of mine, and a folder of theirs in which anybody may write."""

    def __init__(self, root, model):
        self.home, self.shared = root / "home", root / "shared"
        self.home.mkdir()
        (self.home / "kept").write_text(KEPT)
        (self.home / "folder").mkdir()
        give(self.home, MINE, 0o700)
        self.run = made_run(self.shared / "run", model)
        give(self.shared, THEIRS, 0o777)

    def plant(self):
        """Links at every name that the id of this process gives, and in the place of folders."""
        pid = os.getpid()
        for folder in (self.shared, self.run.root, self.shared / "data"):
            folder.mkdir(exist_ok=True)
            os.chown(folder, THEIRS, GROUP)
            folder.chmod(0o777)
            for name in NAMES:
                for draft in (f".{name}.{pid}.tmp", f".{pid}.{name}", f".{name}.tmp", f".{name}"):
                    self.link(folder / draft, "kept")
        for folder in ("tensorboard", "control", "wandb", "mlflow"):
            if not (self.run.root / folder).exists():
                self.link(self.run.root / folder, "folder")
        self.link(self.shared / "first.toml", "new")
        self.link(self.shared / "schema.json", "kept")
        self.link(self.shared / "media", "folder")

    def link(self, path, name):
        path.unlink(missing_ok=True)
        path.symlink_to(self.home / name)
        os.chown(path, THEIRS, GROUP, follow_symlinks=False)

    def of_mine(self):
        """What is at home."""
        return {str(path.relative_to(self.home)): path.is_file() and path.read_text()
                for path in self.home.rglob("*") if ".config" not in path.parts}  # fmt: skip


@pytest.fixture(scope="module")
def place(model):
    needs_another_user()
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        Path(name).chmod(0o755)
        yield Place(Path(name), model)


def run_command(place, words, umask, monkeypatch):
    """Runs a command as me, in the folder of theirs."""

    def command():
        os.chdir(place.shared)
        config = place.home / ".config"
        os.environ |= {"HOME": str(place.home), "XDG_CONFIG_HOME": str(config),
                       "XDG_STATE_HOME": str(config), "XDG_CACHE_HOME": str(config),
                       "MPLCONFIGDIR": str(config)}  # fmt: skip
        sys.argv = ["relax-hpc", *map(str, words)]
        cli.main()

    return as_user(MINE, command, groups=[GROUP], umask=umask, before=place.plant)


IMPORTS = [
    "bus.tools.export", "bus.tools.garbage", "bus.tools.show", "cli.demo.make_tiny", "cli.init",
    "cli.prepare", "launch.cluster", "launch.submit", "runs.boards.export", "runs.boards.finish",
    "runs.cancel", "runs.replay", "runs.report", "runs.resume", "runs.scale.requests",
    "runs.status", "runs.viewer.output", "runtime.telemetry.timeline",
    "trainer.checkpoints.convert",
]  # fmt: skip
"""What the commands import: a child may not read Python's own files where they are root's."""


@pytest.fixture(scope="module", autouse=True)
def imported():
    for name in IMPORTS:
        importlib.import_module(f"relax_hpc.{name}")
    picture.figure(1, 1).savefig(io.BytesIO(), format="png")


LOOKS = {
    "view": (["view", "RUN"], 2),
    "view elsewhere": (["view", "RUN", "--out", "page.html"], 0),
    "peek": (["peek", "RUN"], 0),
    "timeline": (["timeline", "RUN"], 2),
    "timeline elsewhere": (["timeline", "RUN", "--out", "timeline.png"], 0),
    "report": (["report", "RUN"], 2),
    "status": (["status", "RUN"], 2),
    "export": (["export", "mlflow", "RUN", "--offline"], 2),
    "export there": (["export", "mlflow", "RUN", "--tracking-uri", "http://127.0.0.1:9"], 2),
    "bus ls": (["bus", "ls", "RUN"], 0),
    "bus export": (["bus", "export", "RUN", "--to", "rows.jsonl"], 0),
    "bus export Parquet": (["bus", "export", "RUN", "--to", "rows.parquet"], 0),
    "bus media": (["bus", "media", "RUN", "--guid", "0", "--out", "media"], 2),
    "bus gc": (["bus", "gc", "RUN", "--ended"], 2),
    "cancel": (["cancel", "RUN"], 2),
    "scale": (["scale", "out", "RUN", "--engines", "2"], 2),
    "replay": (["replay", "RUN", "--step", "1", "--local"], 2),
    "resume": (["resume", "RUN", "--local"], 2),
    "convert": (["convert", "RUN", "--to", "hf"], 2),
    "init": (["init", "first"], 2),
    "init in the folder": (["init", "second"], 0),
    "schema": (["schema", "--out", "schema.json"], 2),
    "prepare": (["prepare", "gsm8k", "--from", "../source", "--out", "data", "--heldout", "1"], 0),
    "make-tiny": (["make-tiny", "data"], 2),
}


@pytest.mark.parametrize(
    ("what", "umask"),
    [(what, 0o000) for what in LOOKS]
    + [(what, umask) for what in ("bus export", "init", "prepare") for umask in (0o002, 0o077)],
)
def test_a_command_beside_a_stranger_writes_through_none_of_their_links(
    place, monkeypatch, what, umask
):
    rows = "".join(f'{{"question": "{n}+1?", "answer": "so #### {n + 1}"}}\n' for n in range(4))
    (place.home.parent / "source").mkdir(exist_ok=True)
    (place.home.parent / "source" / "train.jsonl").write_text(rows)
    before, run = place.of_mine(), {path: path.lstat() for path in place.run.root.rglob("*")}
    words, code = LOOKS[what]
    words = [place.run.root if word == "RUN" else word for word in words]
    found, said = run_command(place, words, umask, monkeypatch)
    assert found == code, said
    assert place.of_mine() == before, "through a link"
    now = {path: path.lstat() for path in place.run.root.rglob("*")}
    assert not [path for path, each in now.items() if each.st_uid == MINE], "written in their run"
    assert all(now[path].st_mtime_ns == each.st_mtime_ns for path, each in run.items()
               if path.is_file() and not path.is_symlink()), "changed"  # fmt: skip
    assert "Traceback" not in said and (code == 0 or said.count("\n") == 1)
    wrote = [path for path in place.shared.rglob("*") if path.lstat().st_uid == MINE]
    assert not [path for path in wrote if path.name.startswith(".")], "a draft is left"
    assert {path.stat().st_mode & 0o077 for path in wrote if path.is_file()} <= {0}
    for path in wrote:
        path.unlink()  # for the next command


def test_a_run_of_others_is_none_to_change(place):
    """Whatever the command does there afterwards."""
    run = str(place.run.root)
    code, said = as_user(MINE, lambda: print(refusal(lambda: own_run_dir_of(run))), groups=[GROUP])
    assert code == 0 and said.startswith(f"{run}: owner {THEIRS}, mode 0777")


def test_the_owner_of_a_closed_run_needs_no_option_and_gets_it_there(place, monkeypatch):
    run = made_run(place.home / "run", place.run.root.parent)
    tree = json.loads(place.run.config.read_text())
    run.config.write_text(json.dumps(tree | {"run_root": str(place.home)}))
    give(run.root, MINE, 0o700)
    for name in ("view", "timeline"):
        code, said = run_command(place, [name, run.root], 0o022, monkeypatch)
        place.shared.chmod(0o777)
        assert code == 0, said
    assert run.view.stat().st_uid == run.timeline.stat().st_uid == MINE
    run.root.chmod(0o770)
    code, said = run_command(place, ["view", run.root], 0o022, monkeypatch)
    assert code == 2 and "others may write" in said and "chmod -R go-w" in said


def test_a_draft_is_made_anew_though_its_name_is_known(tmp_path, monkeypatch):
    """Were the name of a draft known, a link of that name would not be followed."""
    kept = tmp_path / "kept"
    kept.write_text(KEPT)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    (tmp_path / ".known.tmp").symlink_to(kept)
    with pytest.raises(ConfigError, match="cannot be written: File exists"), \
         write_named(tmp_path / "x", "--out") as file:  # fmt: skip
        file.write(b"theirs")
    assert kept.read_text() == KEPT and not (tmp_path / "x").exists()

    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    name = f".record.{uuid.UUID(int=7).hex[:16]}.tmp"
    (tmp_path / name).symlink_to(kept)
    records.write_text(tmp_path / "record", "mine")
    assert kept.read_text() == KEPT and (tmp_path / "record").read_text() == "mine"


def test_a_file_stays_in_the_folder_that_was_found_when_others_swap_that(tmp_path):
    folder, mine = tmp_path / "folder", tmp_path / "mine"
    folder.mkdir()
    mine.mkdir()
    with write_named(folder / "x", "--out") as file:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(mine)
        file.write(b"text")
    assert (tmp_path / "moved" / "x").read_bytes() == b"text" and not list(mine.iterdir())
    with permissions.hold_folder(mine) as held:
        mine.rename(tmp_path / "gone")
        mine.symlink_to(folder)
        (held / "y").write_text("text")
    assert (tmp_path / "gone" / "y").exists() and not (folder / "y").exists()


def test_a_link_of_a_stranger_is_no_way_to_a_folder_and_one_of_mine_or_roots_is(place):
    target = place.shared / "link" / "file"
    for owner in (MINE, 0, THEIRS):
        (place.shared / "link").symlink_to(place.home)
        os.chown(place.shared / "link", owner, owner, follow_symlinks=False)

        def write():
            with write_named(target, "--out", replace=True) as file:
                file.write(b"x")

        if owner == THEIRS:
            code, said = as_user(MINE, lambda: print(refusal(write)))
            assert f"{place.shared / 'link'}: is a link of user {THEIRS}" in said and code == 0
        else:
            assert as_user(MINE, write) == (0, "")
            (place.home / "file").unlink()
        (place.shared / "link").unlink()
    assert not (place.home / "file").exists()


def refusal(call):
    try:
        call()
    except RelaxError as error:
        return str(error)
    return "nothing was refused"
