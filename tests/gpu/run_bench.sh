#!/usr/bin/env bash
# run_bench.sh PACK WHAT... - measures engines and updates of weights on a machine with GPUs and no
# network: random weights, SGLang, Megatron-core. It uses the GPUs of CUDA_VISIBLE_DEVICES, so that
# several can run beside each other.
#
#   client      1 GPU   our requests against plain ones, 1,024 in flight
#   client-8    1 GPU   likewise in 8 bits: tokens/s beside those of client;  client-8-triton: with
#                       Triton's kernels in place of DeepGEMM's
#   colocated   1 GPU   engine and trainer on the same GPU
#   shared-8    1 GPU   likewise in 8 bits;  shared-16: the same shape in 16
#   wire        2 GPUs  from one GPU to another, and logprobs of both with float32 logits
#   load        2 GPUs  an engine's tokens/s under updates, and left alone
#   wire-8      2 GPUs  in 8 bits;  files, files-8: through files
#   experts-8   2 GPUs  30B-A3B in 8 bits;  experts: in 16
#   engines     4 GPUs  to three engines;  two: 3 GPUs, to two
#   tp2         4 GPUs  from TP2 to TP2
#   experts-ep2 4 GPUs  30B-A3B from EP2 to TP2
#
# PACK is a folder with setup.sh and wheels/, as for run_hetjob.sh. OUT gets WHAT.json, WHAT.log and
# the logs of engines as WHAT-engine-N.log. LIMIT: seconds for each; START: for the start of an engine.
set -uo pipefail
pack=$(cd "$1" && pwd)
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=$(mktemp -d /tmp/relax-gpu.XXXX)
source tests/gpu/unpack.sh

# What needs no compiler and no multicast at start. SGLang turns FlashInfer's fused all-reduce on by
# itself for experts over TP; such an engine was not up after three minutes.
args=(attention_backend=triton sampling_backend=pytorch cuda_graph_backend_prefill=disabled
  enforce_disable_flashinfer_allreduce_fusion=true)
engine=(--set engines.rollout.advanced.start_timeout_s="${START:-190}")
for arg in "${args[@]}"; do engine+=(--set "engines.rollout.args.$arg"); done
graphs() { echo "--set engines.rollout.args.cuda_graph_bs_decode=[$1]"; }
memory() { echo "--set engines.rollout.args.mem_fraction_static=$1"; }
few=$(graphs 1,8,32,64)
many=$(graphs 1,32,64,128,192,256)
fp8='--set weights.quantize=fp8'

measure() { # NAME ARGUMENTS: ended early when its log says that it failed
  local name=$1 tmp="$work/$1" log="$out/$1.log" job status=0
  mkdir -p "$tmp"
  TMPDIR="$tmp" timeout "${LIMIT:-300}" python3 -m relax_hpc bench "${@:2}" "${engine[@]}" \
    --json "$out/$name.json" >"$log" 2>&1 &
  job=$!
  while kill -0 "$job" 2>/dev/null; do
    sleep 2
    for found in "$tmp"/*/engine.log "$tmp"/*/bench/logs/engine-*.log; do
      [ ! -e "$found" ] || cp "$found" "$out/$name-$(basename "$found")" 2>/dev/null
    done
    ! grep -qE '^Traceback|^[A-Za-z.]*Error' "$log" || { sleep 6; kill "$job" 2>/dev/null; }
  done
  wait "$job" || status=$?
  echo "== $name: exit code $status after $SECONDS s"
  grep -vi warn "$log" | tail -n 24 | cut -c 1-220
}

client() { # NAME ARGUMENTS
  # shellcheck disable=SC2046
  measure "$1" generate --shape qwen3-4b --in-flight 1024 --requests 2048 --prompt-tokens 128 \
    --new-tokens 256 --repeats 2 --no-streamed $(memory 0.8) \
    $(graphs 1,64,128,256,384,512,640,768,896,1024) --set engines.rollout.max_running_requests=1024 \
    "${@:2}"
}

for what in "${@:2}"; do
  # shellcheck disable=SC2046,SC2086
  case $what in
    client) client $what ;;
    client-8) client $what $fp8 ;;
    client-8-triton) client $what $fp8 --set engines.rollout.args.fp8_gemm_backend=triton ;;
    colocated) measure $what sync --shape qwen3-4b --colocated --updates 10 --logprobs $few ;;
    shared-16) measure $what sync --shape qwen3-0.6b --colocated --updates 10 --logprobs $few ;;
    shared-8) measure $what sync --shape qwen3-0.6b --colocated --updates 10 --logprobs $few $fp8 ;;
    wire)
      measure $what sync --shape qwen3-4b --updates 10 --in-flight 64 --logprobs $few $(memory 0.7) \
        --set actor.advanced.float32_logits=true --set engines.rollout.args.enable_fp32_lm_head=true
      ;;
    load)
      measure $what sync --shape qwen3-4b --updates 8 --in-flight 256 --every 8 --undisturbed $many \
        $(memory 0.7) --set rollout.max_new_tokens=1024 --set engines.rollout.max_running_requests=256
      ;;
    wire-8) measure $what sync --shape qwen3-4b --updates 10 --logprobs $few $(memory 0.7) $fp8 ;;
    files) measure $what sync --shape qwen3-4b --updates 6 $few $(memory 0.7) --set weights.transport=files ;;
    files-8)
      measure $what sync --shape qwen3-4b --updates 6 $few $(memory 0.7) $fp8 --set weights.transport=files
      ;;
    experts) measure $what sync --shape qwen3-30b-a3b --updates 6 --in-flight 64 $few $(memory 0.75) ;;
    experts-8)
      measure $what sync --shape qwen3-30b-a3b --updates 6 --in-flight 64 $few $(memory 0.75) $fp8 \
        --set 'weights.advanced.modules_to_not_convert=["model.layers.0"]'
      ;;
    engines) measure $what sync --shape qwen3-4b --engines 3 --updates 10 --in-flight 64 $few $(memory 0.7) ;;
    two) measure $what sync --shape qwen3-4b --engines 2 --updates 10 --in-flight 64 $few $(memory 0.7) ;;
    tp2)
      measure $what sync --shape qwen3-4b --tp 2 --engine-tp 2 --updates 10 --in-flight 64 $few $(memory 0.7)
      ;;
    experts-ep2)
      measure $what sync --shape qwen3-30b-a3b --dp 2 --ep 2 --engine-tp 2 --updates 6 --in-flight 64 $few \
        $(memory 0.75)
      ;;
    *) echo "run_bench.sh: what is $what? see its head" >&2 && exit 2 ;;
  esac
done
