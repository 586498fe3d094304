#!/usr/bin/env bash
# run_media.sh PACK JOB SHAPE [ARGUMENTS] - a job whose model sees or hears, with random weights, on a
# machine without a network: on two GPUs or more as a hetjob on a real Slurm, engine and trainer on one
# each; on one GPU without Slurm, in turn; without a GPU the same with a tiny model.
#
#   run_media.sh PACK jobs/qwen3-vl-4b-openr1mm.toml qwen3-vl-4b
#   GPUS=4 LAYERS=8 run_media.sh PACK jobs/qwen3-vl-30b-a3b-geometry3k.toml qwen3-vl-30b-a3b
#
# PACK is as for run_hetjob.sh. OUT gets the run's events and logs, and figures.txt. LIMIT: seconds.
# SIDE: pixels of an image's side. SECONDS_EACH: videos instead, which last so long. LAYERS: of a model with experts. MODEL: folder for
# the model and its prompts. LOCAL=1: without Slurm on the first two GPUs of CUDA_VISIBLE_DEVICES, so that several can run beside
# each other. GPUS=4: two for the engine (TP2) and two for the trainer (TP2, experts on both).
set -euo pipefail
pack=$(cd "$1" && pwd) job=$2 shape=$3
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=$(mktemp -d "${WORK:-/tmp}/relax-gpu.XXXX")
if [ -f "$pack/setup.sh" ]; then source tests/gpu/unpack.sh; fi
model=${MODEL:-$work/model} # one that was made before is taken
[ -d "$model/model" ] || python3 tests/gpu/make_seeing.py "$model" "$shape" "${SIDE:-1024}" "${SECONDS_EACH:-0}" "${LAYERS:-4}"
echo "model made after $SECONDS s"
half=$((${GPUS:-2} / 2)) experts=1
[[ $shape != *a3b ]] || experts=$half
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l) place=(--local)
one_each=(--set engines.rollout.count=1 --set engines.rollout.engines_per_task=1
  --set engines.rollout.args.tp_size=$half --set engines.rollout.resources.gpus_per_node=$half
  --set engines.rollout.resources.cpus_per_task=8 --set engines.rollout.resources.mem=100G
  --set engines.rollout.resources.mpi=pmix --set actor.resources.mpi=pmix
  --set actor.resources.gpus_per_node=$half --set actor.resources.cpus_per_task=8
  --set actor.resources.mem=100G --set actor.layout.tensor_parallel=$half
  --set actor.layout.context_parallel=1 --set actor.layout.expert_parallel=$experts
  --set actor.optimizer.moments=bfloat16 --set actor.optimizer.ddp.grad_reduce_in_fp32=false
  --set actor.tokens_per_micro_batch=8192 --set engines.rollout.args.mem_fraction_static=0.6
  --set engines.rollout.args.attention_backend=triton --set engines.rollout.args.sampling_backend=pytorch
  --set engines.rollout.args.mm_attention_backend=triton_attn
  --set engines.rollout.args.cuda_graph_max_bs=64
  --set engines.rollout.args.cuda_graph_backend_prefill=disabled
  # For experts over TP SGLang would compile FlashInfer's fused all-reduce first: minutes.
  --set engines.rollout.args.enforce_disable_flashinfer_allreduce_fusion=true)
# Of a model of 4B a GPU of 80 GB keeps 49.6 GiB, and 8k tokens of which nothing is recomputed take 26.
[[ $shape != *4b ]] || one_each+=(--set actor.transformer.recompute_granularity=full
  --set actor.transformer.recompute_method=uniform --set actor.transformer.recompute_num_layers=1)
if ((gpus >= 2)) && [ -n "${LOCAL:-}" ]; then
  place=(--local "${one_each[@]}")
elif ((gpus >= 2)); then
  tar -C "$work" -xJf "$pack/slurm.tar.xz"
  env=$(bash "$pack/local_slurm.sh" up --dir "$work/slurm" --prefix "$work/prefix" --auth none \
    --nodes 2 --gpus-per-node $half --gpu-prefix /dev/nvidia --isolate none --cpus 16 --mem 200000)
  eval "$env"
  trap 'bash "$pack/local_slurm.sh" down --dir "$work/slurm"' EXIT
  export OMPI_MCA_btl=self,tcp OMP_NUM_THREADS=4
  place=("${one_each[@]}")
elif ((gpus == 1)); then
  place=(--local "${one_each[@]}" --set engines.rollout.placement=actor
    --set schedule.max_staleness=0 --set engines.rollout.args.mem_fraction_static=0.35)
fi
status=0
timeout "${LIMIT:-400}" python3 -m relax_hpc submit "$job" --follow "${place[@]}" \
  --set name=media --set run_root="$work/runs" --set model.path="$model/model" \
  --set prompts.train="$model/train.jsonl" --set eval.heldout.path="$model/heldout.jsonl" \
  --set reward.name=random --set algorithm.groups.name=as_sampled \
  --set algorithm.groups.truncated=keep --set launch.profile=local --set eval.heldout.every=0 \
  --set eval.heldout.num_prompts=8 --set schedule.num_steps=5 --set schedule.prompts_per_step=16 \
  --set rollout.max_new_tokens=256 --set actor.save_every=1000 --set weights.advanced.checksum_every=1 \
  --set launch.max_restarts=0 "${@:4}" || status=$?
run="$work/runs/media"
python3 tests/gpu/run_figures.py "$run" | tee "$out/figures.txt" || true
((status == 0)) || python3 -m relax_hpc cancel "$run" || true # one that took too long goes on
((status == 0)) || tail -n 30 "$run"/logs/*.log || true
tar -C "$run" -cJf "$out/run.tar.xz" events logs || true
exit "$status"
