#!/usr/bin/env bash
# run_colocated.sh PACK [ARGUMENTS] - a whole job of four steps whose engine is on the trainer's GPU, on
# a machine with one GPU or more and no network: Qwen3-0.6B's shape with random weights, without Slurm.
# Further arguments go to `relax-hpc submit`, such as --set weights.quantize=fp8.
#
# PACK is a folder with setup.sh and wheels/, as for run_hetjob.sh. OUT gets the run's events and logs,
# figures.txt, what `relax-hpc timeline` says, and its picture. LIMIT: seconds.
set -euo pipefail
pack=$(cd "$1" && pwd)
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${WORK:-/tmp}/relax-gpu.XXXX")
source tests/gpu/unpack.sh
python3 tests/gpu/make_qwen3.py "$work/model"
status=0
timeout "${LIMIT:-420}" python3 -m relax_hpc submit jobs/qwen3-0.6b.toml --local --follow \
  --set name=colocated --set run_root="$work/runs" --set model.path="$work/model/model" \
  --set prompts.train="$work/model/train.jsonl" --set eval.heldout.path="$work/model/heldout.jsonl" \
  --set engines.rollout.placement=actor --set engines.rollout.args.mem_fraction_static=0.6 \
  --set schedule.max_staleness=0 --set schedule.num_steps=4 \
  --set weights.advanced.checksum_every=1 --set launch.max_restarts=0 "${@:2}" || status=$?
run="$work/runs/colocated"
tar -C "$run" -cJf "$out/run.tar.xz" events logs || true
python3 tests/gpu/run_figures.py "$run" | tee "$out/figures.txt" || true
python3 -m relax_hpc timeline "$run" --out "$out/timeline.png" | tee "$out/timeline.txt" || true
((status == 0)) || tail -n 40 "$run"/logs/*.log || true
exit "$status"
