"""Shells that export, or have a file set, what could end a script of bash."""

SHELLS = {
    "errexit": {"SHELLOPTS": "braceexpand:errexit"},
    "errexit, nounset, pipefail": {"SHELLOPTS": "errexit:nounset:pipefail:errtrace:functrace"},
    "noglob and noclobber": {"SHELLOPTS": "noglob:noclobber"},
    "allexport": {"SHELLOPTS": "allexport"},
    "posix": {"POSIXLY_CORRECT": "1", "SHELLOPTS": "posix:errexit"},
    "noexec": {"SHELLOPTS": "noexec"},
    "shopt": {"BASHOPTS": "nullglob:failglob:extglob:lastpipe:xpg_echo:localvar_inherit"},
    "names": {"GLOBIGNORE": "*", "TMOUT": "1", "FUNCNEST": "1", "CDPATH": "/", "job_id": "1",
              "BASH_COMPAT": "3.1", "SQUEUE_FORMAT": "%j", "SLURM_TIME_FORMAT": "relative",
              "name": "x", "status": "3", "ranks": "5", "SQUEUE_STATES": "PENDING"},
    "functions": {f"BASH_FUNC_{name}%%": "() { [[ 1 == 2 ]]\n}"
                  for name in ("srun", "sleep", "wait", "test", "[", "cd", "kill", "read", "echo",
                               "date", "join", "tell", "set", "trap", "eval", "local", "timeout")},
    "a file": {"BASH_ENV": """\
set -euo pipefail -o noglob; shopt -s expand_aliases failglob; readonly TMOUT=1; IFS=0_
trap 'exit 9' ERR; trap 'true "$BASH_COMMAND"' DEBUG; trap 'exit 7' EXIT; trap '' TERM
alias srun='echo an alias of' kill=false; umask 000; GLOBIGNORE='*'
export SLURM_TIMELIMIT=1 SLURM_CPU_BIND=rank SLURM_WAIT=1 PMIX_RANK=3
"""},
}  # fmt: skip


def export(name, folder, monkeypatch):
    """Has this process export what the shell of that name does."""
    for variable, value in SHELLS[name].items():
        told = value
        if variable == "BASH_ENV":
            told = folder / "profile"
            told.write_text(value)
        monkeypatch.setenv(variable, str(told))
