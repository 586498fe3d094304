"""Holds the bash code of every job script: supervision.sh restarts steps, and ends them; the rest
keeps the shell that submits, and commands of `setup`, from changing it."""

import re
from pathlib import Path

from relax_hpc.runtime.process import MPI_RANK, MPI_SETTINGS

# srun takes these for options: what its man page names, and what newer versions have. Slurm exports
# component 0's request to the batch script: a component without --ntasks would ask for component
# 0's, and --mem here, --mem-per-cpu there is refused. Inherit nothing; the srun lines say
# everything. Left are which job, which Slurm, and SLURM_PROFILE, SLURM_ACCTG_FREQ and
# SLURM_NETWORK, which say something of all steps.
INHERITED = (
    "SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_NTASKS SLURM_NPROCS "
    "SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_SOCKET "
    "SLURM_CPUS_PER_TASK SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU "
    "SLURM_GPUS_PER_SOCKET SLURM_GPU_FREQ SLURM_GRES SLURM_GRES_FLAGS "
    "SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE "
    "SLURM_THREADS_PER_CORE SLURM_EXACT SLURM_EXCLUSIVE SLURM_HINT SLURM_OVERCOMMIT SLURM_OVERLAP "
    "SLURM_ACCOUNT SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_BURST_BUFFER SLURM_COMPRESS "
    "SLURM_CONSTRAINT SLURM_CONTAINER SLURM_CONTAINER_ID SLURM_CORE_SPEC SLURM_CPU_FREQ_REQ "
    "SLURM_DEBUG SLURM_DEBUG_FLAGS SLURM_DELAY_BOOT SLURM_DEPENDENCY SLURM_DISABLE_STATUS "
    "SLURM_EPILOG SLURM_PROLOG SLURM_TASK_EPILOG SLURM_TASK_PROLOG SLURM_EXIT_ERROR "
    "SLURM_EXIT_IMMEDIATE SLURM_IMMEDIATE SLURM_KILL_BAD_EXIT SLURM_LABELIO SLURM_MPI_TYPE "
    "SLURM_NO_KILL SLURM_OPEN_MODE SLURM_PARTITION SLURM_POWER SLURM_QOS SLURM_REMOTE_CWD "
    "SLURM_REQ_SWITCH SLURM_WAIT4SWITCH SLURM_RESERVATION SLURM_RESV_PORTS SLURM_SEND_LIBS "
    "SLURM_SIGNAL SLURM_SPREAD_JOB SLURM_SRUN_REDUCE_TASK_EXIT_MSG SLURM_STDERRMODE "
    "SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STEP_GRES SLURM_STEP_KILLED_MSG_NODE_ID "
    "SLURM_TEST_EXEC SLURM_THREAD_SPEC SLURM_THREADS SLURM_TIMELIMIT SLURM_UNBUFFEREDIO "
    "SLURM_USE_MIN_NODES SLURM_WAIT SLURM_WCKEY SLURM_WORKING_DIR SLURM_HOSTFILE SLURMD_DEBUG "
    "${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@} ${!SLURM_GPU_BIND@}"
)

# Variables by which bash begins with options of another shell: `noexec` or `onecmd` among these
# would have a script do nothing.
SHELL_OPTIONS = ("SHELLOPTS", "BASHOPTS")

# Commands of the script: a function of that name that is exported or sourced is not meant.
_COMMANDS = (
    "command shopt local declare read kill wait mapfile echo printf test [ umask true false "
    "sleep date timeout rm grep env srun squeue scontrol scancel unalias export eval shift exit "
    "return trap exec break continue :"
)
# Variables of the script. One whose name the submitter exports would reach the tasks in its place.
_KEPT = (
    "job_id ask_controller max_restarts restart_delays_s restart_window_s look_every_s verdict "
    "nothing ranks stopping failed components names server boards"
)
_VARIABLES = (
    f"{_KEPT} status exit_code ended place word board held marks rank count tasks folder mark gone "
    "steps its_id its_task what last sleeper tries said job name id its_name recent each folders "
    "start step watch failures failed_as began often telling part its_step child starts"
)
_LEFT = "|".join(
    f"{each}*" for each in (*MPI_SETTINGS, "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_PMIX_")
)
_FOREIGN = " ".join(
    f"${{!{each}@}}" for each in (*MPI_RANK, "SRUN_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
)

# The tree of fences of Slurm 22.05 lets ranks out of the fence that ends MPI_Init before all are in
# it, and Open MPI crashes on the message of one that is ahead: up to one start in ten over TCP and
# three nodes. The ring does not.
RING = 'export SLURM_PMIX_FENCE="${SLURM_PMIX_FENCE:-ring}"'

SUPERVISION = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")

_FUNCTIONS = " ".join([*re.findall(r"^(\w+)\(\) ", SUPERVISION, re.MULTILINE), "forget set_aside"])

BEGIN = rf"""
# Nothing that the shell which submits exports, nor a file that BASH_ENV names, may change what the
# lines below mean. The first one ends what would end the script, or export all that follows; in
# POSIX mode no function hides `unset` and `set`.
POSIXLY_CORRECT=; \unset -f builtin unset set; \set +aeku +o posix
\unset -f {_COMMANDS} {_FUNCTIONS} slurm_is
unalias -a
export -n {" ".join(SHELL_OPTIONS)}
trap - EXIT
_plain="builtin unset -f unset set shopt trap eval
$(env -i "$BASH" -c 'set +o; shopt -p') # as a shell begins
trap - ERR DEBUG RETURN INT HUP TERM USR1 USR2 CHLD
unset IFS GLOBIGNORE EXECIGNORE FUNCNEST BASH_COMPAT
unset TMOUT 2>/dev/null" # sites have it readonly
eval "$_plain"
# forget NAME...: unsets variables, but for settings of MPI and those that say which Slurm it is.
forget() {{
  local each
  for each in "$@"; do case $each in {_LEFT}) ;; *) unset -v "$each" ;; esac; done
}}
forget {_FOREIGN}
"""

PLAIN = 'builtin eval "$_plain"'

SET_ASIDE = rf"""
# set_aside: variables of others that are called like ours reach the tasks nevertheless.
_theirs=()
set_aside() {{
  local _each _all
  _all=$(export -p)
  for _each in {_VARIABLES}; do
    [[ $_all =~ declare\ -[a-z]*x[a-z]*\ $_each= ]] || continue
    [ -n "${{_theirs[*]}}" ] || _theirs=(env)
    _theirs+=("$_each=${{!_each}}")
    export -n "$_each"
  done
}}
set_aside
"""

KEEP = rf"""
# What a command of `setup` changes of the shell, of our functions and variables, and of Slurm's
# variables ends with it: it would end the supervision, which goes on after failures, hide the marks
# of tasks from it, or tell srun something.
slurm_is() {{ # prints what makes Slurm's variables what they are
  local each
  for each in "${{!SLURM_@}}"; do
    case $each in {_LEFT}) ;; *) printf 'export %s=%q\n' "$each" "${{!each}}" ;; esac
  done
}}
_plain+="
umask $(umask)
unset -f {_COMMANDS} {_FUNCTIONS}
$(declare -f {_FUNCTIONS})
set_aside
$(declare -p {_KEPT})
forget \${{!SLURM_@}} {_FOREIGN.replace("$", chr(92) + "$")}
$(slurm_is)"
"""

WAIT = """\
# One may have given up before the next was started.
[ -z "$failed$stopping" ] || end_all

exit_code=0 ended=()
for place in "${!components[@]}"; do
  join "${components[place]}"
  [ "$status" -ne 0 ] || continue
  ended+=(--ended "${names[place]}=$status")
  # Who was ended with 143, because another gave up, does not say how the job ends.
  [ "$status" -eq 143 ] && [ "$exit_code" -ne 0 ] || exit_code=$status
done
if [ -n "$server" ]; then
  kill "$server" 2>/dev/null
  join "$server"
fi
# They draw the rest, and how they fare is of no account.
word=USR1
[ "$exit_code" -eq 0 ] && [ -z "$stopping" ] || word=USR2
[ -z "${boards[*]}" ] || kill "-$word" "${boards[@]}" 2>/dev/null
for board in "${boards[@]}"; do join "$board"; done
"""
