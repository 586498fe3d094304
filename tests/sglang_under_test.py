"""The SGLang under test, if any: that of the interpreter RELAX_SGLANG_PYTHON."""

import os
import subprocess
from pathlib import Path

_named = os.environ.get("RELAX_SGLANG_PYTHON")
SGLANG_PYTHON = _named and str(Path(_named).absolute())  # its link tells an environment
_SAY_VERSION = "from importlib.metadata import version; print(version('sglang'))"
SGLANG_VERSION = (
    SGLANG_PYTHON
    and subprocess.check_output([SGLANG_PYTHON, "-c", _SAY_VERSION], text=True).strip()
)
