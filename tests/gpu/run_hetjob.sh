#!/usr/bin/env bash
# run_hetjob.sh PACK - the production parts once, on a machine with two or more GPUs and no network:
# a real Slurm of one virtual node per GPU, one hetjob of two components (SGLang, Megatron-core),
# Qwen3-0.6B's shape with random weights, three steps with weight updates over NCCL.
#
# PACK is a folder with setup.sh (makes sglang and megatron-core importable), wheels/ (this project
# and what the machine lacks), slurm.tar.xz (a relocated Slurm in prefix/) and local_slurm.sh.
set -euo pipefail
pack=$(cd "$1" && pwd)
out=${OUT:-$PWD/out}
work=$(mktemp -d /tmp/relax-gpu.XXXX)
source "$pack/setup.sh"
python3 -m pip install --quiet --no-index --no-deps --target "$work/site" "$pack"/wheels/*.whl
export PYTHONPATH="$work/site:$PYTHONPATH"
tar -C "$work" -xJf "$pack/slurm.tar.xz"
gpus=$(nvidia-smi --list-gpus | wc -l)
env=$(bash "$pack/local_slurm.sh" up --dir "$work/slurm" --prefix "$work/prefix" --auth none \
  --nodes "$gpus" --gpus-per-node 1 --gpu-prefix /dev/nvidia --isolate none --cpus 16 --mem 100000)
eval "$env"
trap 'bash "$pack/local_slurm.sh" down --dir "$work/slurm"' EXIT
export OMPI_MCA_btl=self,tcp OMP_NUM_THREADS=4
python3 tests/gpu/make_qwen3.py "$work/model"
status=0
timeout "${LIMIT:-420}" python3 -m relax_hpc submit jobs/qwen3-0.6b.toml --follow \
  --set run_root="$work/runs" --set model.path="$work/model/model" \
  --set prompts.train="$work/model/train.jsonl" --set prompts.heldout="$work/model/heldout.jsonl" \
  --set rollout.resources.mpi=pmix --set actor.resources.mpi=pmix "${@:2}" || status=$?
sacct -X -o JobID,State,NodeList || true
cat "$work"/runs/*/events/actor-0.jsonl || true
tail -n 60 "$work"/runs/*/logs/engine-0.log || true
tail -n 40 "$work"/runs/*/submission/*/*.err || true
mkdir -p "$out"
tar -C "$work" --exclude checkpoints --exclude model -cJf "$out/run.tar.xz" runs slurm/log || true
exit "$status"
