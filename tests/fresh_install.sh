#!/usr/bin/env bash
# fresh_install.sh [FOLDER] - what a new user does, timed: the wheel of this checkout into a new
# environment outside of it, then init, make-tiny and a job to its end.
# STEPS=n trains fewer than the 100 of the job. RESOLVE=1 only has pip resolve the extras, for each
# tested SGLang, and installs nothing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$(mktemp -d)} begun=$SECONDS
unset PYTHONPATH
say() { echo "$((SECONDS - begun)) s: $*"; }
mkdir -p "$folder" && cd "$folder"
export XDG_CONFIG_HOME=$folder/config XDG_STATE_HOME=$folder/state OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet --upgrade pip
cp -r "$here/pyproject.toml" "$here"/{README.md,LICENSE,NOTICE} "$here/relax_hpc" "$here/jobs" "$here/slurm" -t "$(mkdir -p source && echo source)"
env/bin/python -m pip wheel --quiet --no-deps --wheel-dir . ./source
wheel=$(echo relax_hpc-*.whl)
if [ -n "${RESOLVE:-}" ]; then
  for sglang in 0.5.17 0.5.23; do
    env/bin/python -m pip install --quiet --dry-run --report "$sglang.json" "./$wheel[sglang,gpu,wandb]" "sglang==$sglang"
    env/bin/python - "$sglang.json" <<'PY'
import json, sys
found = {each["metadata"]["name"]: each["metadata"]["version"] for each in json.load(open(sys.argv[1]))["install"]}
print({name: found[name] for name in ("sglang", "torch", "transformers", "megatron-core", "nvidia-cudnn-frontend")})
PY
    say "pip resolves for SGLang $sglang"
  done
  exit
fi
torch=$(sed -n 's/.* torch=//p' "$here/slurm/install_env.sh")
if [ ! -e /dev/nvidiactl ]; then # the CUDA build is of no use here
  env/bin/python -m pip install --quiet "torch==$torch" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
fi
env/bin/python -m pip install --quiet "./$wheel"
say "installed"
PATH=$folder/env/bin:$PATH
relax-hpc --version
relax-hpc init first
relax-hpc make-tiny models/tiny >make-tiny.log
say "a model and prompts are made"
relax-hpc check first.toml --local >checked.json
relax-hpc submit first.toml --local --follow ${STEPS:+--set schedule.num_steps=$STEPS} | tee follow.log
say "the job is over"
ls "runs/first/reward.png" runs/first/tensorboard
relax-hpc timeline first >timeline.log
[ "$(python -c 'import relax_hpc; print(relax_hpc.__file__)')" = "$(echo "$folder"/env/lib/python3.*/site-packages/relax_hpc/__init__.py)" ]
