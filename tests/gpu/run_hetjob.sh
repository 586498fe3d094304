#!/usr/bin/env bash
# run_hetjob.sh PACK [JOB [SHAPE [ARGUMENTS]]] - a whole job of production parts on a machine with two
# or more GPUs and no network: a real Slurm of two virtual nodes that share the GPUs, one hetjob of two
# components (SGLang, Megatron-core), a model of SHAPE with random weights, updates over NCCL.
#
#   run_hetjob.sh PACK                                      jobs/qwen3-0.6b.toml, one GPU each
#   run_hetjob.sh PACK jobs/qwen3-4b.toml qwen3-4b          four GPUs
#   run_hetjob.sh PACK jobs/qwen3-4b.toml qwen3-4b --set actor.layout.tensor_parallel=1 \
#     --set actor.resources.gpus_per_node=1 --set engines.rollout.resources.gpus_per_node=1 \
#     --set engines.rollout.count=1 --set engines.rollout.engines_per_task=1      two GPUs
#
# PACK is a folder with setup.sh (makes sglang and megatron-core importable), wheels/ (this project
# and what the machine lacks), slurm.tar.xz (a relocated Slurm in prefix/) and local_slurm.sh.
# OUT gets the run without checkpoints and shards, what `relax-hpc timeline` says, and its picture. LIMIT: seconds.
set -euo pipefail
pack=$(cd "$1" && pwd) job=${2:-jobs/qwen3-0.6b.toml} shape=${3:-qwen3-0.6b}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
limit=${LIMIT:-420}
work=$(mktemp -d "${WORK:-/tmp}/relax-gpu.XXXX") # where checkpoints go, too: WORK=/dev/shm is quick
source tests/gpu/unpack.sh
tar -C "$work" -xJf "$pack/slurm.tar.xz"
gpus=$(nvidia-smi --list-gpus | wc -l)
env=$(bash "$pack/local_slurm.sh" up --dir "$work/slurm" --prefix "$work/prefix" --auth none \
  --nodes 2 --gpus-per-node $((gpus / 2)) --gpu-prefix /dev/nvidia --isolate none \
  --cpus 16 --mem 200000)
eval "$env"
trap 'bash "$pack/local_slurm.sh" down --dir "$work/slurm"' EXIT
export OMPI_MCA_btl=self,tcp OMP_NUM_THREADS=4
python3 tests/gpu/make_qwen3.py "$work/model" "$shape"
echo "model made after $SECONDS s"
name=$(basename "$job" .toml) status=0
timeout "$limit" python3 -m relax_hpc submit "$job" --follow \
  --set run_root="$work/runs" --set model.path="$work/model/model" \
  --set prompts.train="$work/model/train.jsonl" --set eval.heldout.path="$work/model/heldout.jsonl" \
  --set engines.rollout.resources.mpi=pmix --set actor.resources.mpi=pmix "${@:4}" || status=$?
run="$work/runs/$name"
if python3 -m relax_hpc timeline "$run" --out "$out/timeline.png" | tee "$out/timeline.txt"; then
  python3 -m relax_hpc timeline "$run" --steps 2: --out "$out/timeline-warm.png" --json \
    | tee "$out/timeline.json"
fi
sacct -X -o JobID,State,NodeList || true
((status == 0)) || tail -n 40 "$run"/logs/engine-*.log "$run"/submission/*/*.err || true
tar -C "$work" --exclude checkpoints --exclude model --exclude '*.h5' -cJf "$out/run.tar.xz" runs slurm/log || true
exit "$status"
