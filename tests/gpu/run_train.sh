#!/usr/bin/env bash
# run_train.sh [OUT] - the trainer's figures in docs/benchmarks.md, on a machine with GPUs and no
# network: kernels against float64, Qwen3-4B's shape on one GPU, plain Hugging Face beside it and,
# as far as there are GPUs, 2 and 4 of them. With relax_hpc, megatron-core and, best, cudnn
# (nvidia-cudnn-frontend) importable. 80 GB of GPU memory are too little for the figures of one GPU.
set -uo pipefail
out=$(mkdir -p "${1:-out}" && cd "${1:-out}" && pwd)
cd "$(dirname "$0")/../.."
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
gpus=$(nvidia-smi --list-gpus | wc -l)
# 139 GiB have room for what is otherwise computed again.
roomy=(--set actor.kept_logits_gib=5 --set 'actor.recomputed_passes=["norm"]')
measure() { # NAME ARGUMENTS
  python3 -m relax_hpc bench train --json "$out/$1.json" "${@:2}" >"$out/$1.txt" 2>"$out/$1.log" ||
    { echo "$1 failed:"; tail -n 20 "$out/$1.log"; }
  cat "$out/$1.txt"
}
python3 -m pytest -q -s tests/gpu/test_kernels.py -p no:cacheprovider >"$out/kernels.log" 2>&1
grep -E "GiB extra|error of|passed|failed" "$out/kernels.log"
both=(--documents one --documents mix)
measure one-16k --tokens 16384 "${both[@]}" "${roomy[@]}" --profile "$out/profile.txt"
python3 tests/gpu/hf_baseline.py 2>"$out/hf.log" | tee "$out/hf.txt"
measure one-16k-x4 --tokens 16384 --micro-batches 4 --steps 3 "${roomy[@]}"
measure one-32k --tokens 32768 "${both[@]}" --recompute mlp
for size in 2 4; do
  if ((gpus >= size)); then
    measure "dp$size" --tokens 16384 "${both[@]}" --dp "$size" "${roomy[@]}"
    measure "tp$size" --tokens 16384 "${both[@]}" --tp "$size" "${roomy[@]}"
  fi
done
