#!/usr/bin/env bash
# run_colocated.sh [OUT] - trainer and SGLang on the same GPUs, on a machine with one GPU or more:
# how long a turn's change takes, how much memory it frees, the update by CUDA IPC (contents compared
# after the first and the last, logprobs after 0, 1 and 10), then a whole job of four steps.
set -uo pipefail
out=$(mkdir -p "${1:-out}" && cd "${1:-out}" && pwd)
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1
gpus=$(nvidia-smi --list-gpus | wc -l)
measure() { # NAME ARGUMENTS
  echo "== $1"
  python3 -m relax_hpc bench sync --colocated --updates 10 --logprobs --json "$out/$1.json" "${@:2}" \
    >"$out/$1.txt" 2>"$out/$1.log" || { echo "$1 failed:"; tail -n 30 "$out/$1.log"; }
  cat "$out/$1.txt"
}
measure 4b-1gpu --shape qwen3-4b
if ((gpus >= 2)); then
  measure 4b-tp2 --shape qwen3-4b --tp 2 --engine-tp 2
  measure 4b-dp2 --shape qwen3-4b --dp 2 --engines 2
fi

echo "== job"
work=$(mktemp -d /tmp/relax-gpu.XXXX)
python3 tests/gpu/make_qwen3.py "$work/model"
timeout "${LIMIT:-420}" python3 -m relax_hpc submit jobs/qwen3-0.6b.toml --local --follow \
  --set name=colocated --set run_root="$work/runs" --set model.path="$work/model/model" \
  --set prompts.train="$work/model/train.jsonl" --set prompts.heldout="$work/model/heldout.jsonl" \
  --set rollout.placement=actor --set rollout.engine_args.mem_fraction_static=0.6 \
  --set algorithm.max_staleness=0 --set algorithm.num_steps=4 \
  --set weights.checksum_every=1 --set launch.max_restarts=0
status=$?
grep -hE '"(turn|publish|step|verify)"' "$work"/runs/colocated/events/actor-0.jsonl | tee "$out/job.jsonl"
((status == 0)) || tail -n 40 "$work"/runs/colocated/logs/*.log
exit "$status"
