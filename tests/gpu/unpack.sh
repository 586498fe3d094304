# Sourced with $pack and $work: makes this tree, SGLang, Megatron-core and what else PACK brings importable.
# The project's own wheel is among it, since submitit finds our executor by its metadata.
source "$pack/setup.sh"
for wheel in "$pack"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
export PYTHONPATH="$PWD:$work/site:$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1
