#!/usr/bin/env bash
# run_experts.sh PACK [section.key=value...] - a few steps of jobs/qwen3-30b-a3b-dapo-math.toml's shape with random
# weights and rewards, on a machine with four GPUs of 80 GB and 512 GiB, without Slurm and a network: two
# engines (TP2) and the trainer (its experts on four ranks) in turn on all of them.
#
#   run_experts.sh PACK rollout.advanced.routed_experts=true      replayed; false: the router's own choice
#
# PACK is as for run_hetjob.sh; without setup.sh the interpreter has all. MODEL: folder for the model (61 GB),
# which is taken if it is there; LAYERS: of fewer than 48. SHAPE tiny-moe: two ranks and engines, for a machine
# without GPUs. STEPS: 3 unless given. RESUME=1: the run is killed after its first checkpoint, of that step, and resumed
# (305 GB, and as much for its copy; half the layers, half of that). OUT gets the run's events and logs, and figures.txt.
set -euo pipefail
pack=$(cd "$1" && pwd) shape=${SHAPE:-qwen3-30b-a3b}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${WORK:-/dev/shm}/relax-gpu.XXXX")
if [ -f "$pack/setup.sh" ]; then source tests/gpu/unpack.sh; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
model=${MODEL:-$work/model}
sizes=(
  engines.rollout.args.tp_size=2 engines.rollout.args.mem_fraction_static=0.85
  engines.rollout.args.attention_backend=triton engines.rollout.args.sampling_backend=pytorch
  engines.rollout.args.grammar_backend=none "engines.rollout.args.cuda_graph_bs_decode=[1,32,64]"
  engines.rollout.args.cuda_graph_backend_prefill=disabled
  engines.rollout.args.enforce_disable_flashinfer_allreduce_fusion=true
  engines.rollout.resources.gpus_per_node=4 actor.resources.gpus_per_node=4
  actor.layout.expert_parallel=4 actor.layout.data_parallel=4 actor.tokens_per_micro_batch=8192
  actor.optimizer.ddp.grad_reduce_in_fp32=false actor.transformer.recompute_granularity=full
  actor.transformer.recompute_method=uniform actor.transformer.recompute_num_layers=1
  rollout.max_new_tokens=1024 schedule.prompts_per_step=16)
if [ "$shape" = tiny-moe ]; then
  sizes=(engines.rollout.args.tp_size=1 engines.rollout.args.mem_fraction_static=0.5
    engines.rollout.resources.gpus_per_node=0
    actor.resources.gpus_per_node=0 actor.layout.expert_parallel=2 actor.layout.data_parallel=2
    actor.tokens_per_micro_batch=1024 actor.optimizer.moments=float32 actor.optimizer.offload=0
    model.dtype=float32
    rollout.max_new_tokens=16 schedule.prompts_per_step=4)
fi
[ -d "$model/model" ] || python3 tests/gpu/make_qwen3.py "$model" "$shape" ${LAYERS:+"$LAYERS"}
echo "ready after $SECONDS s"
status=0 run="$work/runs/experts" job=jobs/qwen3-30b-a3b-dapo-math.toml
program=(tests/gpu/few_steps.py $job "${STEPS:-3}") every=100
[ -z "${RESUME:-}" ] || { program=(tests/gpu/first_steps.py $job) && every=${STEPS:-3}; }
python3 "${program[@]}" \
  name=experts run_root="$work/runs" model.path="$model/model" \
  prompts.train="$model/train.jsonl" eval.heldout.path="$model/heldout.jsonl" \
  eval.heldout.every=0 eval.heldout.num_prompts=8 reward.name=random \
  algorithm.groups.name=as_sampled algorithm.groups.truncated=keep rollout.samples_per_prompt=8 \
  engines.rollout.placement=actor schedule.max_staleness=0 schedule.num_steps=100 \
  actor.layout.tensor_parallel=1 actor.layout.context_parallel=1 \
  engines.rollout.resources.mem=400G actor.resources.mem=400G \
  engines.rollout.resources.cpus_per_task=8 actor.resources.cpus_per_task=8 \
  actor.save_every=$every weights.advanced.checksum_every=1 launch.max_restarts=0 "${sizes[@]}" \
  "${@:2}" | tee "$out/figures.txt" || status=$?
[ -z "${RESUME:-}" ] || python3 tests/gpu/run_figures.py "$run" | tee -a "$out/figures.txt" || true
((status == 0)) || tail -n 30 "$run"/logs/[ar]*.log | cut -c 1-220 || true
tar -C "$run" -cJf "$out/run.tar.xz" events logs || true
rm -rf "$work"
exit "$status"
