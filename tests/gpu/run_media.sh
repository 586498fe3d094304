#!/usr/bin/env bash
# run_media.sh PACK WHAT... - measures images and sound on a machine with GPUs and no network: random
# weights, SGLang, Megatron-core.
#
#   prepare  no GPU   what media cost on processors
#   towers   1 GPU    the tower of Qwen3-VL-4B's shape: patches/s, against Hugging Face, memory
#   engine   1 GPU    requests with images against SGLang's own way
#   vl       a job of Qwen3-VL-4B's shape: engine and trainer on a GPU each, by a real Slurm of two
#            virtual nodes; colocated, without Slurm, where there is one GPU
#   omni     2 GPUs   likewise the thinker of Qwen3-Omni-30B-A3B with LAYERS layers (6), image and sound
#
# PACK is a folder as for run_hetjob.sh, with sacct_shim.py, too. OUT gets one file for each,
# WHAT.tar.xz: figures and logs, of a job its events. LIMIT: seconds for each; STEPS of a job; WORK: where models go, /dev/shm is quick.
# ARGS: further arguments to `relax-hpc submit`. MODEL=tiny: tiny shapes on processors, what is
# installed in place of PACK's packages, SGLang of ENGINE_PYTHON; Slurm only with SLURM=1.
set -uo pipefail
pack=$(cd "$1" && pwd) steps=${STEPS:-4}
results=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${WORK:-/tmp}/relax-gpu.XXXX")
out="$work/out" && mkdir "$out"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
((gpus < 2)) || SLURM=1
if [ "${MODEL:-}" = tiny ]; then
  export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
else
  source tests/gpu/unpack.sh
fi
export OMPI_MCA_btl=self,tcp OMP_NUM_THREADS=4

engine=(--set engines.rollout.start_timeout_s=240)
if ((gpus)); then # what needs no compiler and no multicast at start, and is in the pack (no FA3)
  for arg in attention_backend=triton sampling_backend=pytorch cuda_graph_backend_prefill=disabled \
    enforce_disable_flashinfer_allreduce_fusion=true mm_attention_backend=triton_attn "cuda_graph_bs_decode=[1,8,32,64]"; do
    engine+=(--set "engines.rollout.args.$arg")
  done
fi

model() { # SHAPE PROMPTS SIDE [LAYERS]: made once
  local shape=$1
  [ "${MODEL:-}" != tiny ] || { [[ $1 == *omni* ]] && shape=tiny-omni || shape=tiny-vl; set -- "$shape" 16 128; }
  folder="$work/$shape"
  [ -d "$folder" ] || python3 tests/gpu/make_media.py "$folder" "$shape" "${@:2}"
  echo "== $shape made after $SECONDS s"
}

bench() { # PART ARGUMENTS
  local shape=qwen3-vl-4b tmp="$work/$1"
  [ "${MODEL:-}" != tiny ] || shape=tiny
  mkdir -p "$tmp"
  TMPDIR="$tmp" timeout "${LIMIT:-240}" python3 -m relax_hpc bench media --part "$1" --shape "$shape" \
    "${@:2}" --json "$out/$1.json" >"$out/$1.log" 2>&1 &
  local pid=$! status=0
  while kill -0 "$pid" 2>/dev/null; do
    sleep 2
    cp "$tmp"/*/engine.log "$out/$1-engine.log" 2>/dev/null
  done
  wait "$pid" || status=$?
  echo "== $1: exit code $status after $SECONDS s"
  if ((status == 0)); then
    python3 tests/gpu/media_figures.py "$out/$1.json"
  else
    tail -qn 25 "$out/$1.log" "$out/$1-engine.log" 2>/dev/null | cut -c 1-300
  fi
  tar -C "$out" -cJf "$results/$1.tar.xz" .
}

slurm_up() {
  [ -z "${SLURM_UP:-}" ] || return 0
  local shared=(--gpus-per-node $((gpus / 2))) env
  ((!gpus)) || shared+=(--gpu-prefix /dev/nvidia)
  tar -C "$work" -xJf "$pack/slurm.tar.xz"
  env=$(bash "$pack/local_slurm.sh" up --dir "$work/slurm" --prefix "$work/prefix" --auth none \
    --nodes 2 "${shared[@]}" --isolate none \
    --cpus "${CPUS:-16}" --mem "${MEMORY:-200000}") || exit 1
  eval "$env"
  trap 'bash "$pack/local_slurm.sh" down --dir "$work/slurm"' EXIT
  SLURM_UP=1
}

number_of() { # EVENT RUN
  cat "$2"/events/actor-0.jsonl 2>/dev/null | grep -c "\"event\": *\"$1\""
}

job() { # NAME JOB ARGUMENTS: runs until STEPS updates were sent and compared, or one side failed
  local name=$1 run="$work/runs/$1" began=$SECONDS where=(--local) state=""
  if [ -n "${SLURM:-}" ]; then
    slurm_up
    where=()
    for side in engines.rollout actor; do
      where+=(--set "$side.resources.gpus_per_node=$((gpus / 2))" --set "$side.resources.time=30"
        --set "$side.resources.mem=${SIDE_MEMORY:-80G}" --set "$side.resources.cpus_per_task=${SIDE_CPUS:-8}")
      ((!gpus)) || where+=(--set "$side.resources.mpi=pmix")
    done
  elif ((gpus)); then
    where+=(--set engines.rollout.placement=actor --set actor.optimizer.offload=0.9
      --set engines.rollout.args.mem_fraction_static=0.35)
  fi
  ((gpus)) || where+=(--set model.dtype=float32 --set engines.rollout.args.mem_fraction_static=0.1
    ${ENGINE_PYTHON:+--set "engines.rollout.resources.python=$ENGINE_PYTHON"})
  # shellcheck disable=SC2086
  python3 -m relax_hpc submit "$2" "${where[@]}" --set name="$name" --set run_root="$work/runs" \
    --set model.path="$folder/model" --set prompts.train="$folder/train.jsonl" \
    --set eval.heldout.path="$folder/heldout.jsonl" --set eval.heldout.every=0 \
    --set eval.heldout.num_prompts=2 --set engines.rollout.count=1 \
    --set engines.rollout.engines_per_task=1 --set reward.name=random --set reward.args={} \
    --set algorithm.groups.name=as_sampled --set algorithm.groups.truncated=keep \
    --set rollout.max_new_tokens=128 --set schedule.num_steps=100 --set schedule.prompts_per_step=8 \
    --set schedule.max_staleness=0 \
    --set weights.checksum_every=1 --set launch.max_restarts=0 --set actor.save_every=1000 \
    --set actor.optimizer.moments=bfloat16 --set actor.optimizer.ddp.grad_reduce_in_fp32=false \
    --set actor.tower_patches=4096 --set actor.tokens_per_micro_batch=4096 \
    "${engine[@]}" "${@:3}" ${ARGS:-} >"$out/$name.log" 2>&1 || state="not submitted"
  while [ -z "$state" ] && ((SECONDS - began < ${LIMIT:-300})); do
    sleep 3
    (($(number_of verify "$run") < steps + 1)) || state="done"
    ! grep -qs '"event": *"error"' "$run"/events/*.jsonl || state="failed"
  done
  echo "== $name: ${state:-out of time} after $((SECONDS - began)) s, $SECONDS s in all"
  python3 tests/gpu/media_figures.py "$run" 2>&1 | cut -c 1-900
  if [ "$state" != "done" ]; then
    tail -n 12 "$out/$name.log" | cut -c 1-300
    tail -qn 15 "$run"/logs/*.log "$run"/submission/*/*.err 2>/dev/null | cut -c 1-300
  fi
  python3 -m relax_hpc timeline "$run" --out "$out/$name.png" >"$out/$name-timeline.txt" 2>&1
  python3 -m relax_hpc cancel "$run" >>"$out/$name.log" 2>&1
  tar -C "$work" --exclude checkpoints --exclude '*.h5' --exclude snapshots --exclude model \
    -cJf "$results/$name.tar.xz" "runs/$name" out 2>/dev/null
  sleep 5 # until the GPUs are free
  rm -rf "$run" "$folder"
}

for what in "${@:2}"; do
  case $what in
    prepare | towers) bench "$what" ;;
    engine)
      ((!gpus)) || engine+=(--set engines.rollout.args.mem_fraction_static=0.8)
      bench engine "${engine[@]}" ${ENGINE_PYTHON:+--python "$ENGINE_PYTHON"}
      ;;
    vl)
      model qwen3-vl-4b 64 1024
      job vl jobs/qwen3-vl-4b-openr1mm.toml --set actor.transformer.recompute_granularity=selective \
        --set 'actor.transformer.recompute_modules=["mlp"]'
      ;;
    omni)
      model qwen3-omni 64 512 "${LAYERS:-6}"
      job omni jobs/qwen3-omni-30b-a3b-avqa.toml --set actor.layout.tensor_parallel=1 \
        --set actor.layout.context_parallel=1 --set actor.layout.expert_parallel=1 \
        --set actor.optimizer.offload=0.3 --set 'actor.frozen=[]' \
        --set actor.resources.gpus_per_node=1 --set engines.rollout.args.tp_size=1
      ;;
    *) echo "run_media.sh: what is $what? see its head" >&2 && exit 2 ;;
  esac
done
