#!/usr/bin/env bash
# run_real.sh PACK MODEL DATA NAME [ARGUMENTS] - jobs/qwen2.5-0.5b-gsm8k.toml with real weights on one GPU
# of a machine without a network, without Slurm. MODEL is a folder from the hub or of `relax-hpc convert`,
# DATA the folder of `relax-hpc prepare gsm8k`. Further arguments go to `relax-hpc submit`, such as
# --set seed=1. What SGLang would compile at its start, or the pack lacks, is turned off.
#
# PACK is a folder with setup.sh and wheels/, as for run_hetjob.sh. OUT gets the run's events and logs as
# NAME-run.tar.xz and NAME.png; the run stays in WORK/runs/NAME. LIMIT: seconds.
set -euo pipefail
pack=$(cd "$1" && pwd) model=$(realpath "$2") data=$(realpath "$3") name=$4
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=$(mkdir -p "${WORK:-/tmp/relax-real}" && cd "${WORK:-/tmp/relax-real}" && pwd)
source tests/gpu/unpack.sh
export OMP_NUM_THREADS=4
settings=()
for arg in attention_backend=triton sampling_backend=pytorch cuda_graph_backend_prefill=disabled; do
  settings+=(--set "engines.rollout.args.$arg")
done
status=0
timeout --signal=INT "${LIMIT:-1200}" python3 -m relax_hpc submit jobs/qwen2.5-0.5b-gsm8k.toml --local --follow \
  --set name="$name" --set run_root="$work/runs" --set model.path="$model" --set prompts.train="$data/train.jsonl" \
  --set eval.heldout.path="$data/heldout.jsonl" "${settings[@]}" "${@:5}" || status=$?
tar -C "$work/runs" --exclude checkpoints --exclude '*.h5' --exclude programs -cJf "$out/$name-run.tar.xz" "$name" || true
cp "$work/runs/$name/reward.png" "$out/$name.png" || true
exit "$status"
