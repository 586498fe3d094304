#!/bin/bash
# component 0: rollout
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --job-name=my-run
#SBATCH --mem=200G
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output='/runs/it'"'"'s here/submission/%j_batch.log'
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1-00:00:00
#SBATCH --exclusive
#SBATCH hetjob
# component 1: actor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --signal=USR2@90

# Nothing that the shell which submits exports, nor a file that BASH_ENV names, may change what the
# lines below mean. The first one ends what would end the script, or export all that follows; in
# POSIX mode no function hides `unset` and `set`.
POSIXLY_CORRECT=; \unset -f builtin unset set; \set +aeku +o posix
\unset -f command shopt local declare read kill wait mapfile echo printf test [ umask true false sleep date timeout rm grep env srun squeue scontrol scancel unalias export eval shift exit return trap exec break continue : nap await_end join hosts left_by all_done end_deaf is_final setup_failed tell delay pause await_controller part_over end_left count_failure supervise serve end_all forget set_aside slurm_is
unalias -a
export -n SHELLOPTS BASHOPTS
trap - EXIT
_plain="builtin unset -f unset set shopt trap eval
$(env -i "$BASH" -c 'set +o; shopt -p') # as a shell begins
trap - ERR DEBUG RETURN INT HUP TERM USR1 USR2 CHLD
unset IFS GLOBIGNORE EXECIGNORE FUNCNEST BASH_COMPAT
unset TMOUT 2>/dev/null" # sites have it readonly
eval "$_plain"
# forget NAME...: unsets variables, but for settings of MPI and those that say which Slurm it is.
forget() {
  local each
  for each in "$@"; do case $each in OMPI_MCA_*|PMIX_MCA_*|SLURM_CONF*|SLURM_CLUSTERS*|SLURM_PMIX_*) ;; *) unset -v "$each" ;; esac; done
}
forget ${!OMPI_@} ${!PMIX_@} ${!PMI_@} ${!SLURM_MPI@} ${!SLURM_PMI@} ${!MPI_LOCAL@} ${!HYDI_CONTROL@} ${!SRUN_@} ${!SQUEUE_@} ${!SCANCEL_@} ${!SCONTROL_@}


# set_aside: variables of others that are called like ours reach the tasks nevertheless.
_theirs=()
set_aside() {
  local _each _all
  _all=$(export -p)
  for _each in job_id ask_controller max_restarts restart_delays_s restart_window_s look_every_s verdict nothing ranks stopping failed components names server boards status exit_code ended place word board held marks rank count tasks folder mark gone steps its_id its_task what last sleeper tries said job name id its_name recent each folders start step watch failures failed_as began often telling part its_step child starts; do
    [[ $_all =~ declare\ -[a-z]*x[a-z]*\ $_each= ]] || continue
    [ -n "${_theirs[*]}" ] || _theirs=(env)
    _theirs+=("$_each=${!_each}")
    export -n "$_each"
  done
}
set_aside

umask 0077
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_SOCKET SLURM_CPUS_PER_TASK SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_GPUS_PER_SOCKET SLURM_GPU_FREQ SLURM_GRES SLURM_GRES_FLAGS SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_THREADS_PER_CORE SLURM_EXACT SLURM_EXCLUSIVE SLURM_HINT SLURM_OVERCOMMIT SLURM_OVERLAP SLURM_ACCOUNT SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_BURST_BUFFER SLURM_COMPRESS SLURM_CONSTRAINT SLURM_CONTAINER SLURM_CONTAINER_ID SLURM_CORE_SPEC SLURM_CPU_FREQ_REQ SLURM_DEBUG SLURM_DEBUG_FLAGS SLURM_DELAY_BOOT SLURM_DEPENDENCY SLURM_DISABLE_STATUS SLURM_EPILOG SLURM_PROLOG SLURM_TASK_EPILOG SLURM_TASK_PROLOG SLURM_EXIT_ERROR SLURM_EXIT_IMMEDIATE SLURM_IMMEDIATE SLURM_KILL_BAD_EXIT SLURM_LABELIO SLURM_MPI_TYPE SLURM_NO_KILL SLURM_OPEN_MODE SLURM_PARTITION SLURM_POWER SLURM_QOS SLURM_REMOTE_CWD SLURM_REQ_SWITCH SLURM_WAIT4SWITCH SLURM_RESERVATION SLURM_RESV_PORTS SLURM_SEND_LIBS SLURM_SIGNAL SLURM_SPREAD_JOB SLURM_SRUN_REDUCE_TASK_EXIT_MSG SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STEP_GRES SLURM_STEP_KILLED_MSG_NODE_ID SLURM_TEST_EXEC SLURM_THREAD_SPEC SLURM_THREADS SLURM_TIMELIMIT SLURM_UNBUFFEREDIO SLURM_USE_MIN_NODES SLURM_WAIT SLURM_WCKEY SLURM_WORKING_DIR SLURM_HOSTFILE SLURMD_DEBUG ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@} ${!SLURM_GPU_BIND@}
export SLURM_UMASK=0077
export SLURM_EXPORT_ENV=ALL
export SUBMITIT_EXECUTOR=hetslurm PYTHONUTF8=1
job_id=$SLURM_JOB_ID
ask_controller=(squeue --noheader --jobs="$job_id")
export SLURM_PMIX_FENCE="${SLURM_PMIX_FENCE:-ring}"
rm -f '/runs/it'"'"'s here/submission'/"$job_id"_exit_code # of an attempt that Slurm requeued
max_restarts=3
restart_delays_s=(0.5 1.0 2.0 4.0 8.0 16.0 30.0)
restart_window_s=1800
look_every_s=15.0
verdict=(/envs/submit/bin/python -P -m relax_hpc.runs.verdict '/runs/it'"'"'s here')

# Bash 5.2 forgets some of the children that end while a trap runs: `wait` for one of them says -1,
# or waits for ever. So it is asked once the child is gone; until then time passes by reading from a
# pipe that has nothing in it, without a process for that.
exec {nothing}<> <(:)
nap() { read -rt 0.2 -u "$nothing"; }
await_end() { while kill -0 "$1" 2>/dev/null; do nap; done; } # await_end CHILD
join() { # join CHILD: sets `status`
  await_end "$1"
  wait "$1"; status=$?
  [ "$status" -ge 0 ] || status=1
}

# hosts GROUP FIRST COUNT: prints nodes of a component. Steps are placed by name: of several that
# begin at the same time Slurm 24.11 puts some elsewhere than where `--relative` says.
hosts() {
  local IFS=, held="SLURM_JOB_NODELIST_HET_GROUP_$1" names
  mapfile -t names < <(scontrol show hostnames "${!held:-$SLURM_JOB_NODELIST}")
  echo "${names[*]:$2:$3}"
}

# Tasks that know nothing of the others of their component have a step of their own: `ranks` are
# those of this one; unset, all of them.
# left_by KIND FOLDER: sets `marks` to the names of the marks that these leave there.
left_by() {
  local rank
  marks=()
  for rank in "${ranks[@]}"; do marks+=("$2/${job_id}_${rank}_$1"); done
  [ -n "${ranks[*]}" ] || marks=("$2/$job_id"_*_"$1")
}

# srun has been seen to say 0 after a node failed; a task that has returned leaves a mark.
all_done() { # all_done TASKS FOLDER...
  local count=0 tasks=$1 folder mark marks
  shift
  for folder in "$@"; do
    left_by done "$folder"
    for mark in "${marks[@]}"; do
      [ ! -e "$mark" ] || count=$((count + 1))
    done
  done
  [ "$count" -ge "$tasks" ]
}

# srun with mpi=pmix over several components (Slurm 22.05) now and then waits for ever for one of
# its own threads when its step has ended, and does not hear TERM.
# end_deaf SRUN FILE: kills that process once Slurm no longer knows the step that FILE names, and
# its first task, whose process FILE names, is gone: Slurm may have forgotten a step that goes on.
end_deaf() {
  local gone=0 steps its_id its_task
  while sleep "$look_every_s"; do
    read -r its_id its_task 2>/dev/null < "$2" || continue
    steps=$(squeue --noheader --steps --jobs="$job_id" --format=%i) || continue
    if grep -qxF "$its_id" <<< "$steps" || kill -0 "$its_task" 2>/dev/null; then
      gone=0
      continue
    fi
    gone=$((gone + 1))
    [ "$gone" -ge 2 ] || continue
    echo "$(date +%FT%T) step $its_id has ended, its srun has not: killing srun"
    kill -KILL "$1"
    return
  done
}

# A task leaves a mark if it ended with an error that a restart does not cure.
is_final() { # is_final FOLDER...
  local folder mark marks
  for folder in "$@"; do
    left_by final "$folder"
    for mark in "${marks[@]}"; do [ ! -e "$mark" ] || return 0; done
  done
  return 1
}

# setup_failed NAME CODE COMMAND: ends the run, since a command before the step failed.
setup_failed() {
  trap '' TERM
  echo "$(date +%FT%T) $1: setup ended with exit code $2: $3"
  tell setup --words "$1: setup ended with exit code $2: $3"
  kill -USR1 "$$"
  exit 1
}

# tell WHAT OPTION...: leaves the verdict in the run directory, see relax_hpc/runs/verdict.py; a
# verdict that storage does not take soon is left out.
tell() {
  local what=$1
  shift
  [ -z "${verdict[*]}" ] || timeout 30 "${verdict[@]}" --job-id "$job_id" --what "$what" "$@" ||
    echo "$(date +%FT%T) the verdict "$what" could not be written"
}

# Seconds before the next start: the more, the more often it failed.
delay() { # delay FAILURES
  local place=$(($1 - 1)) last=$((${#restart_delays_s[@]} - 1))
  echo "${restart_delays_s[place < last ? place : last]}"
}

# Waits before the next start, but not when told to end.
pause() { # pause FAILURES
  sleep "$(delay "$1")" &
  local sleeper=$!
  while [ -z "$stopping" ] && kill -0 "$sleeper" 2>/dev/null; do nap; done
  kill "$sleeper" 2>/dev/null
}

# A start that the controller refused says nothing of the step, nor does one that ended while it was
# away: such a failure is not counted, and nothing is started before there is an answer again.
# await_controller NAME: returns 1 if there was one at once; else 0 once there is, or when told to
# end.
await_controller() {
  "${ask_controller[@]}" > /dev/null 2>&1 && return 1
  echo "$(date +%FT%T) $1: the controller does not answer; waiting for it"
  tell waiting "${failed_as[@]}"
  local tries=1
  until "${ask_controller[@]}" > /dev/null 2>&1; do
    pause "$tries"
    [ -z "$stopping" ] && kill -0 "$$" 2>/dev/null || return 0
    tries=$((tries + 1))
  done
  echo "$(date +%FT%T) $1: the controller answers again"
}

# Slurm gives a component no step any more that was cancelled, though the others go on.
# part_over COMMAND...: prints the component's part of the job and Slurm's word for it, if it has
# ended.
part_over() {
  local said word
  said=$(squeue --noheader --jobs="$job_id" --states=all --format='%i %T' 2>/dev/null) || return 1
  for word in "$@"; do
    case $word in --het-group=*)
      grep -xE "$job_id\+${word#*=} (CANCELLED|COMPLETED|FAILED|TIMEOUT|NODE_FAIL)" <<< "$said" &&
        return 0 ;;
    esac
  done
  return 1
}

# Who kills srun and the helper that it has leaves the step running, which keeps nodes, and engines.
# end_left COMMAND...: ends the step of that name that is there still.
end_left() {
  local word job=$job_id name='' id its_name
  for word in "$@"; do
    case $word in
      --het-group=*) job=SLURM_JOB_ID_HET_GROUP_${word#*=}; job=${!job} ;;
      --job-name=*) name=${word#*=}; break ;; # of several components the first one's
    esac
  done
  [ -n "$name" ] || return 0
  while read -r id its_name; do
    [ "$its_name" = "$name" ] || continue
    echo "$(date +%FT%T) $name: ending step $id"
    scancel -Q "$id"
  done < <(squeue --noheader --steps --jobs="$job" --format='%i %j')
}

# Counts a failure: adds it to `failures`, and leaves those that are older than the window out.
count_failure() {
  local recent=("$SECONDS") each
  for each in "${failures[@]}"; do
    [ "$((SECONDS - each))" -ge "$restart_window_s" ] || recent+=("$each")
  done
  failures=("${recent[@]}")
}

# supervise NAME TASKS FOLDER... -- COMMAND...: runs the step of a component, or of several, and
# again when it fails. @start@ in the command becomes the number of the start.
supervise() {
  local name=$1 tasks=$2 folders=() folder start=1 step='' status stopping='' watch=''
  local failures=() failed_as=() began often telling part marks
  shift 2
  while [ "$1" != -- ]; do folders+=("$1"); shift; done
  shift
  trap 'stopping=1; [ -z "$step" ] || kill "$step" 2>/dev/null' TERM
  local its_step="${folders[0]}/${job_id}_step"
  for folder in "${folders[@]}"; do # of another attempt
    left_by final "$folder"
    rm -f "${marks[@]}"
  done
  while true; do
    rm -f "$its_step"
    began=$(date +%s)
    "${_theirs[@]}" "${@//@start@/$start}" &
    step=$!
    [ -z "$stopping" ] || kill "$step" 2>/dev/null # told to end when `step` was not known yet
    if [ "${#folders[@]}" -gt 1 ]; then end_deaf "$step" "$its_step" & watch=$!; fi
    join "$step"
    [ -z "$watch" ] || kill "$watch" 2>/dev/null
    case $status in # 137: killed, maybe by end_deaf
      0) all_done "$tasks" "${folders[@]}" || status=1 ;;
      137) ! all_done "$tasks" "${folders[@]}" || status=0 ;;
    esac
    failed_as=(--component "$name" --start "$start" --code "$status" --since "$began")
    failed_as+=(--max-restarts "$max_restarts" --window "$restart_window_s")
    [ -z "${ranks[*]}" ] || failed_as+=(--ranks "${ranks[@]}")
    echo "$(date +%FT%T) $name: start $start ended with exit code $status"
    [ "$status" -ne 0 ] || exit 0
    [ -z "$stopping" ] || exit "$status"
    if is_final "${folders[@]}"; then
      echo "$(date +%FT%T) $name: would fail again in the same way, giving up"
      tell ended "${failed_as[@]}"
      kill -USR1 "$$"
      exit "$status"
    fi
    if part=$(part_over "$@"); then
      echo "$(date +%FT%T) $name: its part of the job has ended ($part), giving up"
      tell ended --words "$name: Slurm has ended its part of the job ($part); resume the run"
      kill -USR1 "$$"
      exit "$status"
    fi
    if await_controller "$name"; then
      failed_as+=(--failures 0)
    else
      count_failure
      failed_as+=(--failures "${#failures[@]}")
      if [ "${#failures[@]}" -gt "$max_restarts" ]; then
        echo "$(date +%FT%T) $name: failed ${#failures[@]} times within $restart_window_s s,"           "giving up"
        tell ended "${failed_as[@]}"
        kill -USR1 "$$"
        exit "$status"
      fi
    fi
    [ -z "$stopping" ] || exit "$status"
    [ "$status" -le 128 ] || end_left "$@"
    start=$((start + 1))
    # A rank that had finished takes part again: a slow one must not find all marks there.
    for folder in "${folders[@]}"; do
      left_by done "$folder"
      rm -f "${marks[@]}"
    done
    often=$((${#failures[@]} > 0 ? ${#failures[@]} : 1))
    tell restarted "${failed_as[@]}" --next "$(delay "$often")" & telling=$!
    pause "$often"
    await_end "$telling"
    [ -z "$stopping" ] && kill -0 "$$" 2>/dev/null || exit "$status"
  done
}

# serve NAME COMMAND...: runs beside the components until it is told to end, and again when it
# fails.
serve() {
  local name=$1 child='' starts=0 status stopping='' failures=()
  shift
  trap 'stopping=1; [ -z "$child" ] || kill "$child" 2>/dev/null' TERM
  while true; do
    "$@" &
    child=$! starts=$((starts + 1))
    [ -z "$stopping" ] || kill "$child" 2>/dev/null
    join "$child"
    [ -z "$stopping" ] && [ "$status" -ne 0 ] && kill -0 "$$" 2>/dev/null || return 0
    echo "$(date +%FT%T) $name: start $starts ended with exit code $status"
    count_failure
    [ "${#failures[@]}" -le "$max_restarts" ] || return 1
    pause "${#failures[@]}"
    [ -z "$stopping" ] && kill -0 "$$" 2>/dev/null || return 0
  done
}

ranks=() stopping='' components=() names=() server='' boards=()
end_all() { [ -z "${components[*]}$server" ] || kill "${components[@]}" $server 2>/dev/null; }
trap 'failed=1; end_all' USR1
trap 'stopping=1; end_all' TERM INT HUP
failed=''


# What a command of `setup` changes of the shell, of our functions and variables, and of Slurm's
# variables ends with it: it would end the supervision, which goes on after failures, hide the marks
# of tasks from it, or tell srun something.
slurm_is() { # prints what makes Slurm's variables what they are
  local each
  for each in "${!SLURM_@}"; do
    case $each in OMPI_MCA_*|PMIX_MCA_*|SLURM_CONF*|SLURM_CLUSTERS*|SLURM_PMIX_*) ;; *) printf 'export %s=%q\n' "$each" "${!each}" ;; esac
  done
}
_plain+="
umask $(umask)
unset -f command shopt local declare read kill wait mapfile echo printf test [ umask true false sleep date timeout rm grep env srun squeue scontrol scancel unalias export eval shift exit return trap exec break continue : nap await_end join hosts left_by all_done end_deaf is_final setup_failed tell delay pause await_controller part_over end_left count_failure supervise serve end_all forget set_aside
$(declare -f nap await_end join hosts left_by all_done end_deaf is_final setup_failed tell delay pause await_controller part_over end_left count_failure supervise serve end_all forget set_aside)
set_aside
$(declare -p job_id ask_controller max_restarts restart_delays_s restart_window_s look_every_s verdict nothing ranks stopping failed components names server boards)
forget \${!SLURM_@} \${!OMPI_@} \${!PMIX_@} \${!PMI_@} \${!SLURM_MPI@} \${!SLURM_PMI@} \${!MPI_LOCAL@} \${!HYDI_CONTROL@} \${!SRUN_@} \${!SQUEUE_@} \${!SCANCEL_@} \${!SCONTROL_@}
$(slurm_is)"

[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || tell requeued --before
component_0() {
  { module load cuda
  } || setup_failed rollout "$?" 'module load cuda'
  builtin eval "$_plain"
  { export NCCL_CUMEM_ENABLE=0
  } || setup_failed rollout "$?" 'export NCCL_CUMEM_ENABLE=0'
  builtin eval "$_plain"
  supervise rollout 4 '/runs/it'"'"'s here/submission/rollout' -- srun --het-group=0 --job-name=rollout --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=8 --gpus-per-node=4 --mpi=pmix --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append --cpu-bind=none --nodelist="$(hosts 0 0 2)" --output='/runs/it'"'"'s here/submission/rollout'/"$job_id"_%N_log.out --error='/runs/it'"'"'s here/submission/rollout'/"$job_id"_%N_log.err /envs/sglang/bin/python -u -P -m relax_hpc.launch.entry '/runs/it'"'"'s here' rollout --start @start@ --gpus 4 --by-slurm --bootstrap mpi
}
component_0 & components+=($!) names+=(rollout)

component_1() {
  supervise actor 2 '/runs/it'"'"'s here/submission/actor' -- srun --het-group=1 --job-name=actor --nodes=1 --ntasks=2 --ntasks-per-node=2 --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append --output='/runs/it'"'"'s here/submission/actor'/"$job_id"_%N_log.out --error='/runs/it'"'"'s here/submission/actor'/"$job_id"_%N_log.err /envs/train/bin/python -u -P -m relax_hpc.launch.entry '/runs/it'"'"'s here' actor --start @start@ --by-slurm
}
component_1 & components+=($!) names+=(actor)

serve scaler /envs/submit/bin/python -P -m relax_hpc.runs.scale.scaler '/runs/it'"'"'s here' --job-id "$job_id" --controller "$$" & server=$!

/envs/submit/bin/python -P -m relax_hpc.runs.boards.follower '/runs/it'"'"'s here' --to tensorboard --job-id "$job_id" --controller "$$" & boards+=($!)

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

[ -z "$stopping" ] || tell stopped --words 'the job was told to end: cancelled, preempted, or out of time'
[ -n "$stopping" ] || /envs/submit/bin/python -P -m relax_hpc.runs.boards.finish '/runs/it'"'"'s here' --exit-code "$exit_code" "${ended[@]}" || exit_code=1
[ -z "$stopping" ] || exit_code=143
echo "$exit_code" > '/runs/it'"'"'s here/submission'/"$job_id"_exit_code
exit "$exit_code"
