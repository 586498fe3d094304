#!/usr/bin/env bash
# run_train.sh [OUT [WHAT...]] - the trainer's figures in tests/bench/results/training.md, on a machine with GPUs and no
# network. With relax_hpc, megatron-core and, best, cudnn (nvidia-cudnn-frontend) importable; it uses the
# GPUs of CUDA_VISIBLE_DEVICES.
#
#   one          1 GPU of 139 GiB   kernels against float64, Qwen3-4B's shape, plain Hugging Face beside it
#   dp2, tp2     2 GPUs of 139 GiB  16k tokens; dp4, tp4: likewise on four
#   short        1 GPU of 80 GB     rows of 200 to 2,000 tokens, and short2 on two
#   four         4 GPUs of 80 GB    32k tokens: DP4, TP2 x DP2, CP2 x DP2, CP4, PP2 x TP2
#   experts4     4 GPUs of 80 GB    Qwen3-30B-A3B's shape, all layers, EP4, 220 GB of host memory
#   experts4-139 4 GPUs of 139 GiB  the same with all of the optimizer on the GPUs
#
# WHAT unless given: one, and dp2, tp2, dp4, tp4 as far as there are GPUs. OUT gets NAME.json, .txt and .log.
set -uo pipefail
out=$(mkdir -p "${1:-out}" && cd "${1:-out}" && pwd)
cd "$(dirname "$0")/../.."
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
# 139 GiB have room for what is otherwise computed again; 80 GB have none for float32 moments.
roomy=(--set actor.advanced.kept_logits_gib=5 --set 'actor.advanced.recomputed_passes=["norm"]')
alone=(--set actor.advanced.kept_logits_gib=5 --set 'actor.advanced.recomputed_passes=[]')
lean=(--set actor.optimizer.moments=bfloat16 --set actor.optimizer.ddp.grad_reduce_in_fp32=false)
both=(--documents one --documents mix)
measure() { # NAME ARGUMENTS
  python3 -m relax_hpc bench train --json "$out/$1.json" "${@:2}" >"$out/$1.txt" 2>"$out/$1.log" ||
    { echo "$1 failed:"; tail -n 12 "$out/$1.log" | cut -c 1-300; }
  echo "== $1 after $SECONDS s"
  cat "$out/$1.txt"
}
several=("${@:2}")
((${#several[@]})) || {
  several=(one)
  for size in 2 4; do ((gpus < size)) || several+=("dp$size" "tp$size"); done
}
for what in "${several[@]}"; do
  case $what in
    one)
      python3 -m pytest -q -s tests/gpu/test_kernels.py -p no:cacheprovider >"$out/kernels.log" 2>&1
      grep -E "GiB extra|error of|passed|failed" "$out/kernels.log"
      measure one-16k --tokens 16384 "${both[@]}" "${alone[@]}" --profile "$out/profile.txt"
      python3 tests/gpu/hf_baseline.py 2>"$out/hf.log" | tee "$out/hf.txt"
      measure one-16k-x4 --tokens 16384 --micro-batches 4 --steps 3 "${roomy[@]}"
      measure one-32k --tokens 32768 "${both[@]}" --recompute mlp
      ;;
    dp2 | dp4) measure "$what" --tokens 16384 "${both[@]}" --dp "${what#dp}" "${roomy[@]}" ;;
    tp2 | tp4) measure "$what" --tokens 16384 "${both[@]}" --tp "${what#tp}" "${roomy[@]}" ;;
    short) measure short --tokens 8192 --documents mix --micro-batches 4 --steps 3 "${lean[@]}" ;;
    short2)
      measure short2 --tokens 8192 --documents mix --micro-batches 4 --steps 3 --dp 2 "${lean[@]}"
      ;;
    four)
      measure dp4-32k --tokens 32768 "${both[@]}" --steps 2 --dp 4 --recompute full
      measure tp2-dp2-32k --tokens 32768 "${both[@]}" --steps 2 --tp 2 --dp 2 --recompute mlp
      measure cp2-dp2-32k --tokens 32768 "${both[@]}" --steps 2 --cp 2 --dp 2 --recompute mlp
      measure cp4-32k --tokens 32768 "${both[@]}" --steps 2 --cp 4 --recompute mlp
      measure pp2-tp2 --tokens 16384 --micro-batches 8 --steps 2 --pp 2 --tp 2 --recompute mlp
      ;;
    experts4)
      measure experts4 --shape qwen3-30b-a3b --tokens 16384 --micro-batches 4 --steps 2 --dp 4 --ep 4 \
        "${lean[@]}" --set actor.optimizer.offload=0.9 --recompute "${RECOMPUTE:-mlp}"
      ;;
    experts4-139)
      experts=(--shape qwen3-30b-a3b --steps 2 --dp 4 --ep 4 "${lean[@]}" --set actor.optimizer.offload=0)
      measure experts4-8k --tokens 8192 --micro-batches 8 "${experts[@]}" --recompute mlp
      measure experts4-16k --tokens 16384 --micro-batches 4 "${experts[@]}" --recompute full
      ;;
    *) echo "run_train.sh: what is $what? see its head" >&2 && exit 2 ;;
  esac
done
