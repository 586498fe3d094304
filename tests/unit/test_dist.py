"""What is published: the files of the wheel, what its metadata say, the forms of issues."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
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


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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


def test_a_link_is_a_file_in_the_wheel(wheel):
    links = [path for path in (ROOT / "relax_hpc").glob("**/*") if path.is_symlink()]
    assert len(links) == 2
    for link in links:
        for path in link.resolve().rglob("*.toml"):
            name = (link.relative_to(ROOT) / path.relative_to(link.resolve())).as_posix()
            assert wheel.read(name) == path.read_bytes(), name


def test_the_wheel_says_its_licence_and_brings_it(wheel):
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    said = email.message_from_bytes(wheel.read(metadata))
    assert (said["Name"], said["License-Expression"]) == ("relax-hpc", "Apache-2.0")
    assert said.get_all("License-File") == ["LICENSE", "NOTICE"]
    for name in said.get_all("License-File"):
        brought = metadata.replace("METADATA", f"licenses/{name}")
        assert wheel.read(brought) == (ROOT / name).read_bytes()


def test_the_citation_and_the_project_say_the_same():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    for key in ("version", "license", "keywords"):
        assert citation[key] == project()[key], key
    names = {each["name"].lower() for each in project()["authors"]}
    assert names == {each["name"].lower() for each in citation["authors"]}


def test_the_versions_of_python_are_those_that_are_required():
    lowest, above = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project()["requires-python"]).groups()
    said = [each.rpartition(" ")[2] for each in project()["classifiers"] if "Python ::" in each]
    assert said == [f"3.{minor}" for minor in range(int(lowest), int(above))]


def test_conda_environment_is_in_step_with_the_project():
    environment = yaml.safe_load((ROOT / "env.yaml").read_text(encoding="utf-8"))
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert environment["name"] == project()["name"]
    # pip brings the project itself, so every dependency in pyproject.toml comes along
    assert pip == ["--editable .[dev]"]
    python = next(d for d in conda if d.startswith("python "))
    assert python.removeprefix("python ") == project()["requires-python"]
    versioned = [d for d in conda if re.search(r"[<>=]", d) and d != python]
    assert versioned == [], "no version stands in two files"
    names = {re.split(r"[<>=\[ ]", d)[0] for d in project()["dependencies"]}
    assert {"mpi4py", "h5py"} <= names, "what conda brings is what the project asks for"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_of_an_issue_is_one(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"]
    ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
    assert ids and len(set(ids)) == len(ids)
    for each in form["body"]:
        assert each["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        asked = "value" if each["type"] == "markdown" else "label"
        assert each["attributes"][asked].strip()
    for named in re.findall(r"`?([\w/-]+\.md)\b", path.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named
