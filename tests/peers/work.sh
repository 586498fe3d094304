# Sourced: the work that both sides do, as variables; each can be set before.
# MODE    sync (engines and trainer in turn on all GPUs) or async (one GPU samples, one trains, lag 1)
# SHAPE   of Qwen3, with random weights: qwen3-0.6b, qwen3-1.7b, qwen3-4b
mode=${MODE:-async} shape=${SHAPE:-qwen3-0.6b} gpus=${GPUS:-2} steps=${STEPS:-6}
prompts=${PROMPTS:-16} n=${N:-8} p99=${P99:-512} mean=${MEAN:-0} # MEAN 0: all responses have P99 tokens
tokens=${TOKENS:-16384} mem=${MEM:-0.6} max_run=${MAX_RUN:-256}
graphs=${GRAPHS:-[1,8,32,64,96,128,160,192,224,256]}
folder=${FOLDER:-/tmp/relax-peers}
name=$mode-$gpus-$shape-$([ "$mean" = 0 ] && echo "fixed$p99" || echo "tail$p99")
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
model=$folder/$shape data=$folder/$shape-$p99-$mean-$n
if [ -n "${ROWS:-}" ]; then # made before, with real weights
  data=$ROWS name=${NAME:-gsm8k}
  mkdir -p "$folder"
  return 0
fi
settings=(model.path="$model/model" prompts.train="$model/train.jsonl"
  eval.heldout.path="$model/heldout.jsonl" rollout.samples_per_prompt="$n"
  rollout.max_new_tokens="$p99" schedule.prompts_per_step="$prompts")
(
  export PYTHONPATH="${RELAX_PATH:-$root:${PYTHONPATH:-}}"
  cd "$root"
  [ -d "$model/model" ] || python3 tests/gpu/make_qwen3.py "$model" "$shape" || exit 1
  [ -d "$data" ] ||
    python3 tests/peers/prepare.py jobs/qwen3-0.6b.toml "$data" "$mean" "$p99" "${settings[@]}"
) || exit 1
