"""S12: versions that were tested together are listed, so that an environment can be made again."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOT_HERE = {"sglang", "nvidia-cudnn-frontend", "relax-hpc"} | {
    "mlflow-skinny", "sqlalchemy", "alembic",
}  # fmt: skip
"""Packages of machines with GPUs and of MLflow, and ours."""


def test_each_package_that_is_asked_for_has_a_tested_version_that_meets_what_is_asked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(each for extra in extras for each in extra)]
    lines = (ROOT / "slurm" / "tested.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line[0] != "#")
    tested = {re.sub(r"[-_.]+", "-", name): version for name, version in tested.items()}
    for requirement in map(Requirement, asked):
        name = re.sub(r"[-_.]+", "-", requirement.name.lower())
        if name not in NOT_HERE:
            assert tested[name] in requirement.specifier, requirement
    script = (ROOT / "slurm" / "install_env.sh").read_text(encoding="utf-8")
    assert f"torch={tested['torch']}\n" in script
