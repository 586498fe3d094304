"""conda's environment is pip's: an interpreter that pyproject takes, and no package of pip's."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FEEDSTOCKS = {"python", "pip"}
"""Names whose recipes were looked up: conda-forge/<name>-feedstock."""


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def names():
    """Name -> range of versions, of conda's packages; "" -> the lines of pip."""
    text = (ROOT / "env.yaml").read_text(encoding="utf-8")
    environment = yaml.safe_load(text)
    assert (environment["name"], environment["channels"]) == ("relax-hpc", ["conda-forge"])
    plain = [each.partition(" ") for each in environment["dependencies"] if isinstance(each, str)]
    [of_pip] = [each["pip"] for each in environment["dependencies"] if isinstance(each, dict)]
    return {name: versions for name, _, versions in plain} | {"": of_pip}


def extras_of(line):
    """The extras that a line of pip installs from this folder."""
    found = re.fullmatch(r"--editable \.\[([\w,]+)\]", line)
    assert found, line
    return set(found[1].split(","))


def test_conda_brings_the_interpreter_that_pyproject_asks_for_and_names_that_exist(project, names):
    assert names["python"] == project["requires-python"]
    assert names.keys() - {""} == FEEDSTOCKS


def test_pip_brings_the_rest_by_extras_that_exist_and_conda_none_of_it(project, names):
    extras = project["optional-dependencies"]
    [line] = names[""]
    said = re.findall(r"\.\[[\w,]+\]", (ROOT / "env.yaml").read_text(encoding="utf-8"))
    assert len(said) == 2, "with GPUs, too"
    for each in said:
        assert extras_of(f"--editable {each}") <= extras.keys()
    asked = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    of_pip = {Requirement(each).name for each in asked}
    assert {"mpi4py", "mpich", "h5py", "torch"} <= of_pip and not of_pip & names.keys()
    [brought] = [Requirement(each) for each in extras["dev"] if each.startswith("relax-hpc")]
    assert "mpi" in brought.extras, "MPICH, as the comment says"
    [mpich] = map(Requirement, extras["mpi"])
    assert "4.3.2" in mpich.specifier and "5.0.1" not in mpich.specifier
    assert extras_of(line) == {"dev"}


@pytest.mark.long
def test_what_pip_is_to_bring_can_be_had_in_a_new_environment(names, tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    [line] = names[""]
    # Links: metadata that are made beside them stay out of our folder.
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "relax_hpc", "jobs", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", *line.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    [told] = re.findall("^Would install (.*)$", found.stdout, re.MULTILINE)
    told = {name.rpartition("-")[0].lower() for name in told.split()}
    assert {"relax-hpc", "torch", "megatron-core", "mpi4py", "mpich", "h5py", "pytest"} <= told
