import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_conda_environment_is_in_step_with_the_project():
    environment = yaml.safe_load((ROOT / "env.yaml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert environment["name"] == project()["name"]
    # pip brings the project itself, so every dependency in pyproject.toml comes along
    assert pip == ["--editable .[dev]"]
    python = next(d for d in conda if d.startswith("python "))
    assert python.removeprefix("python ") == project()["requires-python"]


def test_no_version_stands_in_two_files():
    environment = yaml.safe_load((ROOT / "env.yaml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    versioned = [d for d in conda if re.search(r"[<>=]", d) and not d.startswith("python ")]
    assert versioned == []


def test_what_conda_brings_for_python_is_what_the_project_asks_for():
    names = {re.split(r"[<>=\[ ]", d)[0] for d in project()["dependencies"]}
    assert {"mpi4py", "h5py"} <= names
