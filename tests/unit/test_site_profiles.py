"""Public machines as their sites describe them, Cray's MPI and network, AMD, other processors."""

import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from job_trees import job_of

from relax_hpc.errors import ConfigError
from relax_hpc.launch import interpreter, preflight, script
from relax_hpc.launch.placement import place
from relax_hpc.runtime.paths import RunPaths

ROOT = Path(__file__).parents[2]
SITES = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))["sites"]()
SLINGSHOT = {"alps", "isambard-ai", "lumi", "frontier"}
each_site = pytest.mark.parametrize("name", SITES)


def components(profile=None, *, engines=4, kind="embedded", shared=None, **actor):
    """A pool of engines on a node and an actor on another."""
    config = job_of(
        engines__rollout={"count": engines, "kind": kind},
        actor={"resources": actor},
        resources=shared or {},
        launch={"profile": profile} if profile else {},
    )
    return config, place(config)


def said_by(tell, *arguments):
    """Lines that a part of the check says."""
    lines = []
    tell(*arguments, lines.append)
    return lines


@each_site
def test_a_sites_profile_makes_a_job_and_says_whence_it_is(name, tmp_path):
    _, parts = components(name)
    text = SITES[name]
    assert text.splitlines()[1] == "# Not tried. From:" and "https://" in text.splitlines()[2]
    made = script.slurm_script(script.Job("run", tmp_path / "run"), parts)
    subprocess.run(["bash", "-n"], input=made, text=True, check=True)
    assert f"#SBATCH --gpus-per-node={parts[0].gpus}" in made.splitlines()
    for part in parts:
        interpreter.check(part.key, part.resources, use_slurm=True, say=pytest.fail)
        assert all(line in made for line in part.resources.setup)
        most = {"leonardo": 32, "aws-efa": 0, "lumi": 56, "frontier": 56}.get(name, 288)
        asked = (part.resources.cpus_per_task or 0) * part.resources.gpus_per_node
        assert asked == most, "all cores of a node, for as many tasks as GPUs"


def test_the_page_has_each_profile_and_a_source_for_each_network():
    page = (ROOT / "docs" / "reference" / "sites.md").read_text(encoding="utf-8")
    assert len(SITES) >= 5 and {"example", "local"}.isdisjoint(SITES)
    for name, text in SITES.items():
        assert f"## {name}\n\n```toml\n{text}```" in page
    rows = re.findall(r"^\| (\w+) \| .*\| (.*) \|$", page, re.MULTILINE)[1:]
    assert [name for name, _ in rows] == ["InfiniBand", "RoCE", "Slingshot", "EFA"]
    assert all("](https://" in source for _, source in rows)


@each_site
def test_steps_meet_over_slingshot_where_the_profile_asks_for_the_jobs_network(name):
    _, parts = components(name)
    slurm = SimpleNamespace(config={"SwitchType": "switch/hpe_slingshot"})
    assert bool(said_by(preflight.tell_networks, parts, slurm)) == (name not in SLINGSHOT)


def test_what_is_missing_for_slingshot_is_said_and_only_there():
    _, parts = components(shared={"gpus_per_node": 4})
    [line] = said_by(
        preflight.tell_networks, parts, SimpleNamespace(config={"SwitchType": "hpe_slingshot"})
    )
    assert 'rollout.resources.sbatch = ["--network=job_vni,single_node_vni"]' in line
    for config in ({}, {"SwitchType": "slingshot", "SwitchParameters": "a,job_vni=all"}):
        assert said_by(preflight.tell_networks, parts, SimpleNamespace(config=config)) == []
    _, on_cpus = components()
    slurm = SimpleNamespace(config={"SwitchType": "switch/hpe_slingshot"})
    assert said_by(preflight.tell_networks, on_cpus, slurm) == []
    engines, actor = parts
    assert said_by(preflight.tell_networks, [engines], slurm), "four steps"
    assert said_by(preflight.tell_networks, [actor], slurm) == [], "one"


@pytest.mark.parametrize(("name", "steps"), [("alps", 4), ("lumi", 1), ("frontier", 1)])
def test_engines_of_a_node_are_one_step_where_a_second_would_not_start(name, steps):
    [rollout, _] = components(name)[1]
    assert len(rollout.steps) == steps


@pytest.mark.parametrize(("listed", "taken"), [("1310,1271", "1271"), ("1310", "1310"), ("", "")])
def test_a_task_takes_the_jobs_network_of_those_that_slurm_lists(listed, taken, tmp_path):
    RunPaths(tmp_path).component("actor").mkdir(parents=True)
    task = (
        "import os\n"
        "from relax_hpc.launch import entry\n"
        "entry.main(lambda *_: print(os.environ['SLINGSHOT_VNIS'], os.environ['OTHER']))\n"
    )
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "job",
             "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-c", task, tmp_path, "actor", "--start", "1"],
        env=os.environ | local | {"SLINGSHOT_VNIS": listed, "OTHER": "a,b"},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert said.stdout.strip("\n") == f"{taken} a,b"


def test_crays_plug_in_is_known_and_what_ranks_lack_for_it_is_said(monkeypatch):
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)

    def said(**asked):
        return said_by(preflight.tell_mpi, components(engines=1, **asked)[1])

    [line] = said(mpi="cray_shasta")
    assert line.startswith("actor.resources.mpi = 'cray_shasta': starts Cray MPICH only")
    assert "leave mpi out" in line and "lib-abi-mpich/libmpi.so.12" in line
    assert said(mpi="pmi2") == said() == []
    library = "export MPI4PY_LIBMPI=$CRAY_MPICH_DIR/lib-abi-mpich/libmpi.so.12"
    assert said(mpi="cray_shasta", setup=["module load cray-mpich-abi", library]) == []
    _, engines = components(shared={"mpi": "cray_shasta"})
    assert engines[0].bootstrap == "files" and len(said_by(preflight.tell_mpi, engines)) == 1


def test_torch_for_amds_gpus_is_named_and_sglang_refused_with_it(monkeypatch):
    versions = {"torch": "2.11.0+rocm7.1"}
    monkeypatch.setattr(metadata, "version", versions.get)

    def said(**asked):
        return said_by(preflight.check_torch, *components(**asked))

    gpus = {"gpus_per_node": 8}
    assert said() == [], "on CPUs"
    [line] = said(shared=gpus)
    assert line.startswith("torch 2.11.0+rocm7.1: is for AMD's GPUs")
    with pytest.raises(ConfigError, match=r"engines.rollout.kind = 'sglang': torch .*\+rocm7.1 is"):
        said(shared=gpus, kind="sglang")
    assert said(shared=gpus | {"python": "/another/python"}, kind="sglang") == []
    versions["torch"] = "2.14.1"
    assert said(shared=gpus, kind="sglang") == []


def test_no_module_knows_one_processor_only():
    files = sorted((ROOT / "relax_hpc").rglob("*.py"))
    named = {file: file.read_text(encoding="utf-8") for file in files}
    named = {file: text for file, text in named.items() if re.search("x86_64|amd64", text)}
    assert len(named) >= 2, "it does look"
    assert [file for file, text in named.items() if "aarch64" not in text] == []


_PLAYED = {
    "sinfo": "echo 'main*|n1|gpu:4'; echo 'main*|n2|gpu:4'",
    "scontrol": '[ "${@: -1}" != config ] || echo "SwitchType = switch/hpe_slingshot"',
    "srun": "printf 'MPI plugin types are...\\n\\tcray_shasta\\n\\tnone\\n\\tpmi2\\n' >&2",
    "sbatch": "cat > /dev/null; echo 'sbatch: Job 1 to start at 2030-01-01T00:00:00' >&2",
    "sacctmgr": "exit 1",
}
"""A Cray's answers."""


def test_check_says_all_of_that_on_a_cray(remarked, tmp_path, monkeypatch):
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, lines in _PLAYED.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    versions = {"torch": "2.11.0+rocm7.1"}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or real(name))
    words = ('actor.resources.mpi="cray_shasta"', "resources.gpus_per_node=1")
    said = remarked("check", "job.toml", *(part for each in words for part in ("--set", each)))
    assert "network: Slingshot gives each step a network of its own" in said
    assert "actor.resources.mpi = 'cray_shasta': starts Cray MPICH only" in said
    assert "torch 2.11.0+rocm7.1: is for AMD's GPUs" in said
