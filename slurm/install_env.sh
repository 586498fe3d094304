#!/usr/bin/env bash
# install_env.sh PYTHON VENV - a virtual environment with relax-hpc and what its tests need.
# TORCH_INDEX=URL names an index of PyTorch's CPU wheels; where pip's own index has only the CUDA
# build, that saves gigabytes on a machine without a GPU.
set -euo pipefail
python=$1 venv=$2 torch=2.13.0
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
  echo "$python is $("$python" -V): relax-hpc needs Python 3.11 to 3.13; make PYTHON=python3.12 ..." >&2
  exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
if [ ! -e /dev/nvidiactl ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  pip install "torch==$torch" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
fi
pip install --editable ".[dev]"
