#!/usr/bin/env bash
# run_relax.sh [section.key=value ...] - this project on the work of work.sh, without Slurm.
# OUT gets NAME.relax.jsonl (the trainer's events) and NAME.relax.log. LIMIT: seconds. FEW: cancelled
# after so many steps, without a last checkpoint.
set -uo pipefail
source "$(dirname "$0")/work.sh"
cd "$root"
export PYTHONPATH="${RELAX_PATH:-$root:${PYTHONPATH:-}}"
half=$((gpus > 1 ? gpus / 2 : 1))
settings+=(name="$name" run_root="$folder/runs" schedule.num_steps="$steps" schedule.over_age=wait
  engines.rollout.max_running_requests="$max_run"
  engines.rollout.args.mem_fraction_static="$mem"
  engines.rollout.args.cuda_graph_bs_decode="$graphs" actor.tokens_per_micro_batch="$tokens"
  actor.save_every=100000 launch.max_restarts=0 rollout.advanced.over_sampling=0
  eval.heldout.num_prompts=1) # verl is told to evaluate nothing
[ "$mean" = 0 ] || settings+=(rollout.environment="$data/lengths.py:Drawn")
if [ "$mode" = sync ]; then
  settings+=(engines.rollout.placement=actor schedule.max_staleness=0
    engines.rollout.count="$gpus" engines.rollout.engines_per_task="$gpus"
    engines.rollout.resources.gpus_per_node="$gpus"
    actor.layout.data_parallel="$gpus" actor.resources.gpus_per_node="$gpus")
else
  settings+=(schedule.max_staleness=1 engines.rollout.count="$half"
    engines.rollout.engines_per_task="$half" engines.rollout.resources.gpus_per_node="$half"
    actor.layout.data_parallel="$half" actor.resources.gpus_per_node="$half")
fi
overrides=()
for each in "${settings[@]}" "$@"; do overrides+=(--set "$each"); done
if [ -n "${DRY:-}" ]; then
  exec python3 -m relax_hpc submit jobs/qwen3-0.6b.toml --local --dry-run "${overrides[@]}"
fi
command=(timeout "${LIMIT:-540}" python3 -m relax_hpc submit jobs/qwen3-0.6b.toml --local --follow "${overrides[@]}")
[ -z "${FEW:-}" ] || command=(timeout --signal=INT --kill-after=30 "${LIMIT:-540}"
  python3 tests/gpu/few_steps.py jobs/qwen3-0.6b.toml "$FEW" "${settings[@]}" "$@")
"${command[@]}" >"$out/$name.relax.log" 2>&1
status=$?
run=$folder/runs/$name
rm -rf "$run/checkpoints" # 56 GB of a 4B
cat "$run"/events/actor-0*.jsonl >"$out/$name.relax.jsonl" 2>/dev/null
((status == 0)) || { tail -n 20 "$run"/logs/*.log | cut -c 1-240; echo "exit $status"; }
exit $status
