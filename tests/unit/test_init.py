"""A job and a profile to begin with: valid, explained, and of this cluster."""

import tomllib

import pytest
from typer.testing import CliRunner

from relax_hpc.cli import init
from relax_hpc.cli.main import app
from relax_hpc.config import job_file
from relax_hpc.launch import profiles

SINFO = """\
cpu*|10|64|(null)|infinite|(null)
gpu|4|96|gpu:h100:4(S:0-1)|2-00:00:00|h100,ib
"""
COMMANDS = {
    "sinfo": f"cat <<'END'\n{SINFO}END",
    "srun": "echo 'MPI plugin types are...'; echo '\tpmix' >&2",
    "sacctmgr": 'case "$*" in *Account*) echo proj1; echo proj2 ;; *) echo normal ;; esac',
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "config" / "relax-hpc"


@pytest.mark.parametrize("like", job_file.list_jobs())
def test_a_job_is_that_of_which_it_is_begun_with_its_keys_explained(like, tmp_path):
    text = init.job_text(like, "mine", tmp_path / "schema.json")
    (tmp_path / "mine.toml").write_text(text)
    mine = tomllib.loads(text)
    assert mine == tomllib.loads(job_file.list_jobs()[like].read_text()) | {"name": "mine"}
    assert job_file.load(tmp_path / "mine.toml").name == "mine"
    assert text.startswith(f"#:schema file://{tmp_path}/schema.json\n")
    path = text.index('\npath = "')
    assert "Hugging Face folder of a model" in "".join(text[:path].splitlines()[-3:])


def test_init_writes_a_job_and_what_slurm_tells_of_the_cluster_once(home):
    said = CliRunner().invoke(app, ["init", "first"])
    assert said.exit_code == 0, said.exception
    assert "next: relax-hpc check first.toml" in said.stdout
    text = (home / "default.toml").read_text()
    assert tomllib.loads(text) == {"partition": "gpu"}
    assert "#   gpu        4      96     gpu:h100:4  2-00:00:00  h100,ib\n" in text
    assert '# account = "proj1"        # yours: proj1, proj2\n' in text
    assert '# mpi = "pmix"' in text and "qos" not in text, "one QOS is no choice"
    uncommented = text.replace("# account", "account").replace("# [", "[").replace("# gpus", "gpus")
    (home / "default.toml").write_text(uncommented)
    assert profiles.load(None).rollout.gpus_per_node == 4
    again = CliRunner().invoke(app, ["init", "first"])
    assert str(again.exception) == "first.toml: is there already; choose another name"
    assert CliRunner().invoke(app, ["init", "second"]).exit_code == 0
    assert (home / "default.toml").read_text() == uncommented, "the user's own by now"
