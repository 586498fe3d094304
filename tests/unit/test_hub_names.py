"""Models by names on the Hugging Face hub: the cache's snapshot, or the line that brings it."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from relax_hpc.config.job_file import load, read_resolved
from relax_hpc.errors import ConfigError
from relax_hpc.launch import submit
from relax_hpc.runtime.paths import RunPaths

OLD, NEW = "1" * 40, "2" * 40
HUB_JOB = ["model.path=Org/Tiny"]


def snapshot(cache, commit, files, ref=None):
    """Adds a snapshot as the hub's library keeps it: links to blobs."""
    repo = cache / "models--Org--Tiny"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repo / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = hashlib.sha1(content).hexdigest()
        (repo / "blobs" / blob).write_bytes(content)
        (repo / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob}")
    if ref:
        (repo / "refs" / ref).write_text(commit)
    return repo / "snapshots" / commit


@pytest.fixture
def files(tiny_model):
    return {path.name: path.read_bytes() for path in tiny_model.iterdir()}


@pytest.fixture
def cache(job, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(job / "hub"))
    return job / "hub"


def resolved(*overrides):
    return submit.resolve(load(Path("job.toml"), overrides))[0]


def test_a_name_on_the_hub_is_the_snapshot_that_the_cache_has_then(cache, files):
    old = snapshot(cache, OLD, files, ref="main")
    more = ["engines.judge.model=Org/Tiny", "algorithm.preset=ppo", "critic.path=Org/Tiny@main"]
    config = resolved(*HUB_JOB, *more)
    found = [config.model.path, config.engines["judge"].model, config.critic.path]
    assert found == [old] * 3
    paths = RunPaths(config.run_dir)
    submit.make_run_dir(config, paths)
    new = snapshot(cache, NEW, files, ref="main")
    assert read_resolved(paths.config).model.path == old, "a resume takes what was begun with"
    assert resolved(*HUB_JOB).model.path == new
    assert resolved(f"model.path=Org/Tiny@{OLD}").model.path == old


def test_a_folder_of_that_name_wins(cache, files):
    snapshot(cache, OLD, files, ref="main")
    Path("Org/Tiny").mkdir(parents=True)
    assert resolved(*HUB_JOB).model.path == Path("Org/Tiny").absolute()


def test_what_the_cache_lacks_is_refused_with_the_line_that_brings_it(cache, files, refused):
    assert refused("check", "job.toml", "--local", "--set", "model.path=Org/Tiny@v1") == (
        f"model.path = 'Org/Tiny@v1': no such folder, and no such model in the Hugging Face cache "
        f"{cache}; where there is a network: hf download Org/Tiny --revision v1, or relax-hpc "
        "fetch JOB"
    )
    with pytest.raises(ConfigError, match=r"^engines.judge.model = 'Org/Tiny': no such folder"):
        resolved("engines.judge.model=Org/Tiny")
    weights = files.pop("model.safetensors")
    folder = snapshot(cache, OLD, files, ref="main")
    lacks = f"model.path = 'Org/Tiny': {folder} is not complete, it lacks model"
    assert refused("data", "job.toml", "--set", *HUB_JOB).startswith(f"{lacks}.safetensors; where")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    more = {"model.safetensors.index.json": json.dumps(index).encode()}
    snapshot(cache, OLD, more | {"model-1.safetensors": weights})
    assert f"{lacks}-2.safetensors; " in refused("check", "job.toml", "--set", *HUB_JOB)
    for name in ("models/Tiny", "Org/Tiny/x", "Org--a/Tiny", "-/Tiny", "Org/.."):
        assert resolved(f"model.path={name}").model.path == Path(name).absolute()


@contextmanager
def hub(files):
    """Serves a repository as the hub does, whose `main` is at NEW."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            api, place = "/api/models/Org/Tiny", self.path.split("?")[0]
            name = place.removeprefix(f"/Org/Tiny/resolve/{NEW}/")
            tree = [
                {"type": "file", "path": each, "size": len(content), "oid": f"{index:040}"}
                for index, (each, content) in enumerate(files.items())
            ]
            answers = {
                f"{api}/revision/main": {"id": "Org/Tiny", "sha": NEW},
                f"{api}/tree/{NEW}": tree,
            }
            content = json.dumps(answers[place]).encode() if place in answers else files.get(name)
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
            self.send_header("X-Repo-Commit", NEW)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_fetch_loads_sets_of_the_hub_and_leaves_files_alone(job, monkeypatch, ran):
    asked = []

    def load_dataset(*name, split):
        asked.append((*name, split))
        return [{}] * 3

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    more = ["--set", "eval.heldout.path=hf:a/b:main/test[1:]"]
    assert ran("fetch", "job.toml", *more).out == "hf:a/b:main/test[1:]: 2 rows are there\n"
    assert asked == [("a/b", "main", "test")]
    assert "nothing to bring" in ran("fetch", "job.toml").out


def test_fetch_brings_a_model_that_is_found_from_then_on(job, files):
    def said(command, *options, endpoint="http://127.0.0.1:9"):
        env = {"HF_HOME": str(job / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": ""}
        line = [sys.executable, "-m", "relax_hpc", command, "job.toml", "--set", *HUB_JOB, *options]
        done = subprocess.run(line, env=os.environ | env, capture_output=True, text=True)
        return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]

    folder = job / f"hf/hub/models--Org--Tiny/snapshots/{NEW}"
    code, lines = said("fetch")
    assert code == 2 and len(lines) == 1 and lines[0].startswith("Org/Tiny: cannot be brought: ")
    with hub(files | {"pytorch_model.bin": b"x", "original/a.json": b"{}"}) as endpoint:
        code, lines = said("fetch", endpoint=endpoint)
        size = f"{sum(map(len, files.values())) / 1e9:.2f} GB in {len(files)} files"
        assert lines[:2] == [f"Org/Tiny: {size} to bring", f"Org/Tiny: {size}, there in {folder}"]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        code, lines = said("fetch", endpoint=endpoint)
        assert lines[0] == f"Org/Tiny: {size}, there in {folder}", "nothing is brought again"
        missing = said("fetch", "--set", "model.path=Org/None", endpoint=endpoint)
        assert missing[0] == 2 and missing[1][-1].startswith("Org/None: the hub has no such model")
    code, lines = said("check", "--local", "--all")
    assert code == 0 and f'    "path": "{folder}",' in lines
