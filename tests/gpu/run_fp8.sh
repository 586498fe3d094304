#!/usr/bin/env bash
# run_fp8.sh [OUT] - weights in 8 bits to SGLang, beside 16 bits: ten updates, bytes compared after
# the first and the last, logprobs of engine and trainer after versions 0, 1 and 10. One GPU: engine
# and trainer share it; two or more: broadcast and files, too. A machine of Hopper's, no network.
set -uo pipefail
out=$(mkdir -p "${1:-out}" && cd "${1:-out}" && pwd)
cd "$(dirname "$0")/../.."
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
gpus=$(nvidia-smi --list-gpus | wc -l)
measure() { # NAME ARGUMENTS
  echo "== $1"
  python3 -m relax_hpc bench sync --updates 10 --logprobs --json "$out/$1.json" "${@:2}" \
    >"$out/$1.txt" 2>"$out/$1.log" || { echo "$1 failed:"; tail -n 20 "$out/$1.log"; }
  cat "$out/$1.txt"
}
fp8=(--set weights.quantize=fp8)
measure shared-16 --shape qwen3-0.6b --colocated
measure shared-8 --shape qwen3-0.6b --colocated "${fp8[@]}"
if ((gpus >= 2)); then
  measure wire-16 --shape qwen3-4b
  measure wire-8 --shape qwen3-4b "${fp8[@]}"
  measure files-16 --shape qwen3-0.6b --set weights.transport=files
  measure files-8 --shape qwen3-0.6b --set weights.transport=files "${fp8[@]}"
  measure experts-8 --shape qwen3-30b-a3b "${fp8[@]}" --set weights.modules_to_not_convert='["model.layers.0"]'
fi
