"""A real run under the most open umask there is, with somebody at every port it opens.

It shares with its group, which opens most. Under other umasks, tasks only write a file each.
"""

import functools
import stat
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import toys
from adversary import bomb, needs_another_user, open_to_nobody, talk
from torch.distributed import DistError, TCPStore

from relax_hpc.cli.demo import models, tasks
from relax_hpc.config import job_file
from relax_hpc.inference import members
from relax_hpc.launch import script
from relax_hpc.launch.script import Job
from relax_hpc.launch.submit import submit
from relax_hpc.runs.cancel import cancel
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

REPOSITORY = Path(__file__).parents[2]
OWN_GROUP = "root"
EVERYWHERE = {"0.0.0.0", "::"}
SAID_OF_STORES = range(1, 60)
"""Keys under which a counter would have put what ranks say to each other."""


class Witness:
    """Sees everything that everybody on the node sees of a run, and knocks at all its doors."""

    def __init__(self, folder):
        self.mark, self.paths = folder / "executed", RunPaths(folder / "runs" / "umask-000")
        self.texts, self.listeners, self._rude = set(), set(), []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self):
        self._thread.start()

    def stop(self):
        self._over.set()
        self._thread.join(30)
        for connection in self._rude:
            connection.close()

    def _watch(self):
        while not self._over.wait(0.2):
            record = read_json(self.paths.launch_record)
            if record is None:
                continue
            with suppress(psutil.NoSuchProcess):
                bash = psutil.Process(record["controller"]["pid"])
                for process in bash.children(recursive=True):
                    with suppress(psutil.NoSuchProcess, OSError):
                        self._look_at(process)

    def _look_at(self, process):
        for file in ("cmdline", "environ"):
            self.texts.add(Path(f"/proc/{process.pid}/{file}").read_bytes())
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr not in self.listeners:
                self.listeners.add(each.laddr)
                threading.Thread(target=self._knock, args=each.laddr, daemon=True).start()

    def _knock(self, host, port):
        self._rude += talk(host, port, self.mark)
        with suppress(DistError, RuntimeError):
            store = TCPStore(host, port, None, False, timedelta(seconds=2), wait_for_workers=False)
            for key in SAID_OF_STORES:
                store.set(str(key), bomb(self.mark))
                store.set(f"{key}/0", bomb(self.mark))


@pytest.fixture(scope="module")
def folder():
    """A model and prompts, where others may pass: it is the run that has to keep them out."""
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "runs").mkdir(mode=0o755)
        tokenizer = models.tokenizer()
        tasks.write_additions(folder, 1, 64, 16, 0)
        models.save(folder / "model", models.model(tokenizer, seed=0), tokenizer)
        yield folder


@contextmanager
def submitted(folder, umask, **changes):
    """The paths of a run of two trainer ranks and an engine, which is cancelled at the end."""
    settings = {
        "name": f"umask-{umask:03o}", "run_root": folder / "runs", "model.path": folder / "model",
        "prompts.train": folder / "train.jsonl", "eval.heldout.path": folder / "heldout.jsonl",
        "actor.layout.tensor_parallel": 2, "actor.save_every": 1, "schedule.num_steps": 2,
        "schedule.prompts_per_step": 8, "eval.heldout.every": 0, "launch.max_restarts": 0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    paths = RunPaths(folder / "runs" / settings["name"])
    with permissions.set_umask(umask):
        submit(job_file.load(REPOSITORY / "jobs" / "demo.toml", overrides), local=True)
    try:
        yield paths
    finally:
        cancel(paths.root)


@pytest.fixture(scope="module")
def watched(folder):
    """A run, watched from its first process to its last."""
    witness = Witness(folder)
    witness.start()
    try:
        with submitted(folder, 0, launch__advanced__share="group") as paths:
            wait_for(paths.summary.exists, 120, paths)
            wait_for(lambda: list(paths.submission.glob("*_exit_code")), 60, paths)
    finally:
        witness.stop()
    return witness


def wait_for(condition, timeout_s, paths):
    deadline = time.monotonic() + timeout_s
    while not condition():
        logs = "\n".join(log.read_text() for log in paths.submission.glob("*_batch.log"))
        assert time.monotonic() < deadline and "giving up" not in logs, logs
        time.sleep(0.1)


def everything(paths):
    return [paths.root, *paths.root.rglob("*")]


def is_token_bearing(path, paths):
    return path == paths.secret or (path.parent == paths.root / "logs" and "engine" in path.name)


def test_the_run_goes_on_whoever_knocks_and_executes_nothing(watched):
    summary = read_json(watched.paths.summary)
    steps = [e for e in read_events(watched.paths.events_folder) if e["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2], summary
    assert len(watched.listeners) >= 4  # engine, ranks, stores, gloo
    assert not watched.mark.exists()


def test_nothing_listens_on_every_address(watched):
    assert {address.ip for address in watched.listeners}.isdisjoint(EVERYWHERE)


def test_the_owners_bits_are_all_that_is_not_shared(watched):
    for path in everything(watched.paths):
        mode = stat.S_IMODE(path.stat().st_mode)
        allowed = 0o750 if path.is_dir() else 0o640
        assert mode & ~allowed == 0, (path, oct(mode))
        if is_token_bearing(path, watched.paths):
            assert mode == 0o600, (path, oct(mode))


def test_nobody_else_reads_or_writes_any_of_it(watched):
    needs_another_user()
    control = watched.paths.root.parents[1] / "train.jsonl"  # it would notice
    control.chmod(0o644)
    assert open_to_nobody([control]) == {("r", control)}
    assert open_to_nobody(everything(watched.paths)) == set()


@pytest.mark.parametrize("umask", [0o002, 0o022])
def test_a_run_that_is_not_shared_is_its_owners_alone_whatever_the_umask(
    folder, umask, monkeypatch
):
    """Real processes from bash to the entry of a task; what runs in it inherits their umask."""
    needs_another_user()
    monkeypatch.setattr(script, "Job", functools.partial(Job, task=toys.TASK))
    run = RunPaths(folder / "runs" / f"umask-{umask:03o}")
    places = {role: (run.root / "left", run.component(role)) for role in ("rollout", "actor")}
    calls = {
        role: ["leave", *(place / f"by-{role}" for place in both)] for role, both in places.items()
    }
    toys.write(run.root.parent, **calls)
    with submitted(folder, umask, actor__layout__tensor_parallel=1) as paths:
        wait_for(lambda: len(list(paths.submission.glob("*/*_done"))) == 2, 60, paths)
    found = everything(paths)
    assert len([path for path in found if path.name in {"by-actor", "by-rollout"}]) == 4
    assert len([path for path in found if path.name.endswith(("_log.out", "_log.err"))]) == 4
    assert open_to_nobody(found) == open_to_nobody(found, group=OWN_GROUP) == set()
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_group_reads_shards_and_records_but_no_token_and_writes_nothing(watched):
    needs_another_user()
    paths = watched.paths
    found = open_to_nobody(everything(paths), group=OWN_GROUP)
    assert {way for way, _ in found} == {"r"}
    readable = {path for _, path in found}
    assert len([path for path in readable if path.suffix == ".h5"]) >= 1
    assert {paths.config, paths.roster, paths.member("rollout-0")} <= readable
    assert not [path for path in readable if is_token_bearing(path, paths)]


def test_tokens_and_the_secret_are_in_no_command_line_environment_log_or_record(watched):
    paths = watched.paths
    member = members.find(paths, "rollout-0")
    words = {
        "secret": paths.secret.read_bytes(),
        "token": RunSecret.read(paths.secret).engine_token(member.id, member.start).encode(),
    }
    seen = {str(text): text for text in watched.texts}
    seen |= {
        path: path.read_bytes()
        for path in everything(paths)
        if path.is_file() and path != paths.secret
    }
    assert any(b"--tasks" in text for text in watched.texts)  # it did look
    for name, word in words.items():
        assert len(word) == 64
        assert [where for where, text in seen.items() if word in text] == [], name
