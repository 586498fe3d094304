"""The job script under whatever the shell that submits has exported, and files that it sources."""

import os
import re
import subprocess

import pytest

from relax_hpc.launch import script, supervision
from relax_hpc.launch.placement import Component
from relax_hpc.sections import Resources

# A step that fails at first; it notes its environment, functions of bash included.
STEP = """#!/bin/bash -p
cd "$(dirname "$0")"
echo . >> starts
tr '\\0' '\\n' < /proc/$$/environ > environment
[ "$(wc -l < starts)" -ge 2 ] || exit 3
touch submission/rollout/7_0_done
"""

PROFILE = """\
set -euo pipefail
set -o noclobber -o noglob -o functrace -o errtrace -o allexport
shopt -s nullglob failglob expand_aliases lastpipe localvar_inherit xpg_echo
trap 'exit 9' ERR; trap 'true "$BASH_COMMAND"' DEBUG; trap 'exit 7' EXIT; trap '' TERM
readonly TMOUT=1
IFS=0123456789_ GLOBIGNORE='*' FUNCNEST=1 BASH_COMPAT=3.2 EXECIGNORE='*/date'
alias srun='echo alias of' kill=false
sleep() { return 1; }; kill() { :; }; read() { :; }; join() { echo theirs; }; tell() { exit 8; }
umask 000
"""

FAKES = [
    *supervision._COMMANDS.replace(" [ ", " ").replace(" :", "").split(),
    *("unset", "set", *supervision._FUNCTIONS.split()),
]


def options(*names):
    return {"SHELLOPTS": ":".join(["braceexpand", *names])}


SHELLS = {
    "keyword": options("keyword"),
    "posix": options("posix", "errexit") | {"POSIXLY_CORRECT": "1"},
    "all else at once": options(
        "errexit", "nounset", "pipefail", "errtrace", "noglob", "noclobber", "allexport", "monitor",
        "notify",
    ) | {
        "BASHOPTS": "nullglob:failglob:extglob:lastpipe:xpg_echo:localvar_inherit",
        "GLOBIGNORE": "*", "IFS": "0", "TMOUT": "1", "FUNCNEST": "1", "CDPATH": "/",
        "BASH_COMPAT": "3.1", "EXECIGNORE": "*/date", "ENV": "/nowhere", "LC_ALL": "de_DE",
        "a file": PROFILE,
    } | {f"BASH_FUNC_{name}%%": "() { [[ 1 == 2 ]]\n}" for name in [*FAKES, "builtin"]},
}  # fmt: skip


def run(tmp_path, variables, setup=(), write=script.slurm_script):
    for name, text in (("srun", STEP), ("squeue", "#!/bin/sh\n"), ("scontrol", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = script.Job("toy", tmp_path, 1, (0.0,), has_summary=False)
    parts = [Component("rollout", 1, Resources(setup=list(setup)))]
    script.make_folders(job, parts)
    text = write(job, parts)
    if write is script.local_script:
        text = re.sub(r" -- \S+ -P -m relax_hpc.launch.local_step ", f" -- {tmp_path}/srun ", text)
    (tmp_path / "script").write_text(text)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    return subprocess.run(
        ["bash", tmp_path / "script", "7"], env=environment, capture_output=True, text=True,
        timeout=20,
    )  # fmt: skip


def starts_again(tmp_path, done):
    """The step failed, was started again, and the job ended well."""
    said = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert said == [
        "rollout: start 1 ended with exit code 3",
        "rollout: start 2 ended with exit code 0",
    ], done
    assert (tmp_path / "submission" / "7_exit_code").read_text() == "0\n"
    assert done.returncode == 0, done


def is_not_changed_by(shell, tmp_path, write):
    (tmp_path / "profile").write_text(shell.pop("a file", ""))
    starts_again(
        tmp_path, run(tmp_path, {"BASH_ENV": str(tmp_path / "profile")} | shell, write=write)
    )
    seen = (tmp_path / "environment").read_text()
    assert "OPTS=" not in seen and "max_restarts" not in seen
    for name in supervision._FUNCTIONS.split():
        assert f"BASH_FUNC_{name}%%" not in seen


@pytest.mark.parametrize("write", [script.slurm_script, script.local_script])
@pytest.mark.parametrize("shell", SHELLS)
def test_no_shell_that_submits_changes_what_the_script_does(tmp_path, shell, write):
    """O2."""
    is_not_changed_by(dict(SHELLS[shell]), tmp_path, write)


def test_variables_that_are_called_like_ours_reach_the_tasks_as_they_were(tmp_path):
    """O2: every word of the script in lower case that could be a variable of it."""
    text = script.slurm_script(script.Job("toy", tmp_path), [Component("rollout", 1, Resources())])
    theirs = dict.fromkeys({*re.findall(r"(?<![\w%$-])[a-z][a-z_]*\b", text)}, "it's theirs")
    assert {"job_id", "name", "status", "ranks", "step", "max_restarts"} <= {*theirs}
    starts_again(tmp_path, run(tmp_path, theirs, setup=["export folder=new"]))
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert {name: seen.get(name) for name in theirs} == theirs | {"folder": "new"}


LINES = [
    *PROFILE.replace("trap 'exit 7' EXIT; ", "").splitlines(),
    "; ".join(f"function {name} {{ [[ 1 == 2 ]]; }}" for name in FAKES),
    "job_id=8 max_restarts=0 stopping=1; export failed=1 names=x; ranks=(5); nothing=99",
    "set -o posix; set -k; set -t",
]


def test_no_command_of_setup_changes_what_the_script_does(tmp_path):
    """O2: one after the other."""
    starts_again(tmp_path, run(tmp_path, {}, setup=[*LINES, "true"]))


# Some variables that srun's man page says it reads and no line of ours overrides.
READ_BY_SRUN = (  # noqa: SIM905
    "SLURM_ACCOUNT SLURM_CONSTRAINT SLURM_CPU_BIND SLURM_DEPENDENCY SLURM_EXCLUSIVE SLURM_GRES "
    "SLURM_MEM_BIND SLURM_PARTITION SLURM_QOS SLURM_RESERVATION SLURM_SIGNAL SLURM_TIMELIMIT "
    "SLURM_WAIT SLURM_WORKING_DIR SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SRUN_EXPORT_ENV"
).split()
OF_A_RANK = ["PMIX_RANK", "PMI_FD", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_MPI_TYPE"]
SETTINGS = {"OMPI_MCA_btl": "self,tcp", "PMIX_MCA_gds": "hash", "SLURM_PMIX_FENCE": "tree"}


def test_neither_the_job_around_nor_setup_tells_srun_or_mpi_anything(tmp_path):
    """O8, O11: half of the variables come before the script, the others by `setup`."""
    names = [*READ_BY_SRUN, *OF_A_RANK]
    setup = [f"export {' '.join(f'{name}=1' for name in names[1::2])}",
             "export SLURM_JOB_ID=8 SLURM_UMASK=0 SLURM_EXPORT_ENV=NONE SLURM_RESTART_COUNT=9",
             "export SLURM_PMIX_FENCE=tree; unset SLURM_JOB_NODELIST"]  # fmt: skip
    around = dict.fromkeys(names[::2], "1") | SETTINGS | {"SLURM_JOB_NODELIST": "n[1-2]"}
    starts_again(tmp_path, run(tmp_path, around, setup))
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert not {*names} & {*seen}
    kept = {"SLURM_JOB_ID": "7", "SLURM_UMASK": "0077", "SLURM_EXPORT_ENV": "ALL"}
    kept |= SETTINGS | {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert {name: value for name, value in seen.items() if name.startswith("SLURM_")} == {
        name: value for name, value in kept.items() if name.startswith("SLURM_")
    }
    assert kept.items() <= seen.items()
