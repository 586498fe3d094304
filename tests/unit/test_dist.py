"""What is published: the files of the wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import os, shutil
from setuptools.build_meta import build_sdist, build_wheel
shutil.unpack_archive(build_sdist('.'), 'unpacked')
os.chdir(os.path.join('unpacked', *os.listdir('unpacked')))
build_wheel(os.environ['WHEELS'])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as `make dist` does, from an sdist, without the time that an environment takes."""
    copy, wheels = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    for name in ("relax_hpc", "jobs", "slurm"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    made = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=copy, env=os.environ | {"WHEELS": str(wheels)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(*wheels.glob("*.whl")) as file:
        yield file


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    ours = {
        Path(folder, name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "relax_hpc", followlinks=True)
        for name in names
        if Path(folder).name != "__pycache__"
    }
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {"relax_hpc/py.typed", "relax_hpc/config/jobs/tiny/arithmetic.toml"} < ours
    assert {"relax_hpc/launch/sites/local.toml", "relax_hpc/runs/viewer/page.html.j2"} < ours
    assert names == ours
