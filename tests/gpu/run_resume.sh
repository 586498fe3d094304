#!/usr/bin/env bash
# run_resume.sh PACK [SHAPE [section.key=value...]] - from submit to the first step, and from `resume`
# of a run that was killed to its first, on a machine with two GPUs and no network, without Slurm: a
# model of SHAPE with random weights, one GPU for the engine and one for the trainer.
#
# PACK is a folder with setup.sh and wheels/, as for run_hetjob.sh; without setup.sh the interpreter has
# all, and SHAPE tiny runs without a GPU. FOLDER (by default in /tmp) has the model, made by
# run_modes.sh or here, and the run with its checkpoint (40 GB of qwen3-4b). OUT gets resume.txt and
# the events. LIMIT: seconds.
set -euo pipefail
pack=$(cd "$1" && pwd) shape=${2:-qwen3-4b}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=${FOLDER:-/tmp/relax-modes}/$shape
mkdir -p "$work"
if [ -f "$pack/setup.sh" ]; then source tests/gpu/unpack.sh; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
job=jobs/qwen3-4b.toml model=$work/model
settings=(rollout.max_new_tokens=256 schedule.prompts_per_step=16
  engines.rollout.count=1 engines.rollout.engines_per_task=1
  engines.rollout.resources.gpus_per_node=1 engines.rollout.args.mem_fraction_static=0.75
  'engines.rollout.args.cuda_graph_bs_decode=[1,16,64,128,256]'
  actor.layout.tensor_parallel=1 actor.resources.gpus_per_node=1
  actor.tokens_per_micro_batch=8192 actor.optimizer.moments=bfloat16
  actor.optimizer.ddp.grad_reduce_in_fp32=false actor.transformer.recompute_granularity=full
  actor.transformer.recompute_method=uniform actor.transformer.recompute_num_layers=1)
if [ "$shape" = tiny ]; then
  job=jobs/demo.toml settings=(schedule.prompts_per_step=4 rollout.samples_per_prompt=4)
  [ -d "$model/model" ] || python3 -m relax_hpc make-tiny "$model" >/dev/null
elif [ ! -d "$model/model" ]; then
  python3 tests/gpu/make_qwen3.py "$model" "$shape"
fi
echo "ready after $SECONDS s"
rm -rf "$work/resumed"
status=0
timeout --signal=INT "${LIMIT:-400}" python3 tests/gpu/first_steps.py "$job" name=resumed run_root="$work" \
  model.path="$model/model" prompts.train="$model/train.jsonl" eval.heldout.path="$model/heldout.jsonl" \
  eval.heldout.num_prompts=1 schedule.num_steps=100 actor.save_every=2 launch.max_restarts=0 \
  "${settings[@]}" "${@:3}" | tee "$out/resume.txt" || status=$?
((status == 0)) || tail -n 25 "$work"/resumed/logs/*.log | cut -c 1-220 || true
tar -C "$work/resumed" -cJf "$out/resumed-events.tar.xz" events || true
rm -rf "$work/resumed/checkpoints"
exit "$status"
