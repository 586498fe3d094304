# Sourced with $pack and $work: makes this tree, SGLang, Megatron-core and what else PACK brings importable.
# The project's own wheel is among it (wheels.sh), since submitit finds our executor by its metadata. All is
# compiled at once, torch too: where packages come without bytecode, every process of a run compiles them for
# itself, two to five minutes of a start.
source "$pack/setup.sh"
unpacked=$(mktemp -d "$work/site.XXXX") # of this call alone: several may run beside each other
for wheel in "$pack"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$unpacked"; done
site=${SITE:-/tmp/site}
compiled=("$unpacked" "$PWD/relax_hpc")
if [ ! -e "$site.compiled" ]; then
  torch=$(python3 -c 'import torch; print(torch.__path__[0])')
  compiled+=("$site" "$torch" "$torch/../triton")
fi
python3 -m compileall -q -j 0 "${compiled[@]}" >/dev/null 2>&1 || true # some files are read by no Python
touch "$site.compiled"
export PYTHONPATH="$PWD:$unpacked:$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1
