#!/usr/bin/env bash
# wheels.sh OUT - what a GPU machine without a network lacks, for Python 3.12 on x86-64: this project as a
# wheel (submitit finds our executor by its metadata) and what it needs beside torch, SGLang, Megatron-core and
# their needs. Of hdf5plugin one filter, of its 110 MB. MEDIA=1: also what decodes videos (35 MB) and sounds.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
names=(hdf5plugin crc32c tenacity math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2)
[ -z "${MEDIA:-}" ] || names+=(av soundfile soxr)
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 5 12 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
  --abi abi3 --abi none "${platforms[@]}" -d "$out" "${names[@]}"
python3 -m pip wheel -q --no-deps -w "$out" .
python3 - "$out" <<'PY'
import sys, zipfile
from pathlib import Path

[whole] = Path(sys.argv[1]).glob("hdf5plugin-*.whl")
part = whole.with_suffix(".draft")
with zipfile.ZipFile(whole) as source, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as target:
    for each in source.infolist():
        if "/plugins/libh5" not in each.filename or "libh5zstd" in each.filename:
            data = source.read(each)
            if each.filename.endswith("hdf5plugin/_utils.py"):  # of filters that are not there
                data = data.replace(b'logger.error(f"Cannot initialize', b'logger.debug(f"Cannot initialize')
            target.writestr(each, data)
part.rename(whole)
PY
ls -l "$out"
