"""Packages that Megatron-core could use, and does without."""

import warnings


def hush() -> None:
    """Leaves out what it says of them, once per module, when it is imported."""
    for package in ("Apex", "Transformer Engine"):
        warnings.filterwarnings(
            "ignore", rf"{package} .*not installed", UserWarning, module="megatron"
        )
