#!/usr/bin/env bash
# run_modes.sh PACK [SHAPE [MODE... [-- ARGUMENTS]]] - `relax-hpc bench modes` on a machine with two GPUs
# and no network, without Slurm: a model of SHAPE with random weights, colocated on both GPUs (two
# engines, a trainer of two replicas), or one GPU for the engine and one for the trainer. GPUS=4: twice
# as many of all, and of the work.
#
#   run_modes.sh PACK                                  all modes, Qwen3-4B's shape
#   run_modes.sh PACK qwen3-4b staleness-1             one mode; what FOLDER has of others is shown, too
#   run_modes.sh PACK qwen3-0.6b colocate -- --mean 768 --p99 4096
#
# PACK is a folder with setup.sh and wheels/, as for run_hetjob.sh; without setup.sh the interpreter has
# all, and SHAPE tiny runs without a GPU. OUT gets SHAPE.json, SHAPE.md, SHAPE.png, and of each mode its
# events, or its logs if it failed. FOLDER (by default in /tmp) has the model and what is done, which is
# not done again: later calls on the same machine add modes; SHAPE, GPUs and ARGUMENTS must stay the same.
# LIMIT: seconds of a mode from when its processes begin; ended by a signal, it still keeps what there is.
set -euo pipefail
pack=$(cd "$1" && pwd) shape=${2:-qwen3-4b}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
modes=() arguments=()
for word in "${@:3}"; do
  if [ "$word" = -- ] || ((${#arguments[@]})); then arguments+=("$word"); else modes+=("$word"); fi
done
((${#modes[@]})) || modes=(colocate staleness-0 staleness-1 staleness-2)
cd "$(dirname "$0")/../.."
work=${FOLDER:-/tmp/relax-modes}/$shape
mkdir -p "$work"
if [ -f "$pack/setup.sh" ]; then source tests/gpu/unpack.sh; fi
job=jobs/qwen3-4b.toml model=$work/model half=$((${GPUS:-2} / 2))
sides=(--set schedule.prompts_per_step=$((16 * half)) --set engines.rollout.count=$half
  --set engines.rollout.engines_per_task=$half --set actor.layout.data_parallel=$half)
sizes=(--mean 384 --p99 2048 --warm-up 1 --steps 6 --set rollout.samples_per_prompt=8 "${sides[@]}"
  --set engines.rollout.resources.gpus_per_node=$half --set engines.rollout.args.mem_fraction_static=0.75
  --set "engines.rollout.args.cuda_graph_bs_decode=[1,16,64,128,256]"
  --set actor.layout.tensor_parallel=1 --set actor.resources.gpus_per_node=$half
  --set actor.tokens_per_micro_batch=8192 --set actor.optimizer.moments=bfloat16
  --set actor.optimizer.ddp.grad_reduce_in_fp32=false
  --set actor.transformer.recompute_granularity=full --set actor.transformer.recompute_method=uniform
  --set actor.transformer.recompute_num_layers=1)
if [ "$shape" = tiny ]; then
  job=jobs/demo.toml
  sizes=(--mean 12 --p99 64 --warm-up 1 --steps 6 --set rollout.samples_per_prompt=4 "${sides[@]}")
  [ -d "$model/model" ] || python3 -m relax_hpc make-tiny "$model" >/dev/null
elif [ ! -d "$model/model" ]; then
  python3 tests/gpu/make_qwen3.py "$model" "$shape"
fi
echo "ready after $SECONDS s"
((${#arguments[@]})) || arguments=(--)
wanted=() status=0
for mode in colocate staleness-0 staleness-1 staleness-2; do
  [[ " ${modes[*]} " == *" $mode "* || -e $work/runs/$mode.json ]] && wanted+=(--mode "$mode")
done
keep() {
  for mode in "${modes[@]}"; do
    if [ -d "$work/runs/$mode" ] && [ ! -e "$work/runs/$mode.json" ]; then # it failed
      tail -n 25 "$work/runs/$mode"/logs/*.log 2>/dev/null | cut -c 1-220 || true
    fi
    tar -C "$work/runs" --exclude checkpoints --exclude '*.h5' --exclude weights --exclude '*.safetensors' \
      -cJf "$out/$mode.tar.xz" "$mode" 2>/dev/null || true
  done
}
trap keep EXIT
minutes=$(awk "BEGIN { print ${LIMIT:-330} / 60 }")
python3 -X faulthandler -m relax_hpc bench modes "$job" "${wanted[@]}" --folder "$work/runs" --limit "$minutes" \
  --json "$out/$shape.json" --plot "$out/$shape.png" --set model.path="$model/model" \
  --set prompts.train="$model/train.jsonl" "${sizes[@]}" "${arguments[@]:1}" \
  >"$out/$shape.md" || status=$?
echo "== after $SECONDS s"
cat "$out/$shape.md"
exit "$status"
