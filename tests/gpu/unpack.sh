# Sourced with $pack and $work: makes this tree, SGLang, Megatron-core and what else PACK brings importable.
# The project's own wheel is among it, since submitit finds our executor by its metadata. All is compiled at
# once, torch too: where packages come without bytecode, every process of a run compiles them for itself,
# two to five minutes of a start.
source "$pack/setup.sh"
for wheel in "$pack"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
if [ ! -e "$work/compiled" ]; then
  installed=$(python3 -c 'import torch; print(torch.__path__[0])')
  python3 -m compileall -q -j 0 "$work/site" "${SITE:-/tmp/site}" "$PWD/relax_hpc" "$installed" \
    "$installed/../triton" >/dev/null 2>&1 || true # a package has files that no Python reads
  touch "$work/compiled"
fi
export PYTHONPATH="$PWD:$work/site:$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1
