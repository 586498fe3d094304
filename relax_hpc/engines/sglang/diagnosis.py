"""The reading of SGLang's log: how far a start has come, and a remedy for one that failed."""

import re

from relax_hpc.sections import PassThrough

_PHASES = (
    ("server_args=", "starting its workers"),
    ("Init torch distributed begin", "joining its ranks"),
    ("Init parallel begin", "joining its ranks"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating the key-value cache"),
    ("CUDA graph begin", "capturing graphs"),
    ("Capturing batches", "capturing graphs"),
    ("max_total_num_tokens=", "starting its HTTP server"),
    ("Uvicorn running on", "warming up"),
)
"""Text of 0.5.17 to 0.5.23, in the order of a start, and what goes on from there."""

_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port is already in use", re.IGNORECASE)

_CAUSES = (
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static"
        r"|Loaded weights leave no GPU memory for the KV cache",  # 0.5.23
        "the weights leave no room for the key-value cache: raise "
        "{pool}.args.mem_fraction_static ({mem_fraction_static}) or tp_size ({tp_size})",
    ),
    (
        r"out of memory|can(?:'t|not) allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED",
        "out of memory: lower {pool}.args.mem_fraction_static ({mem_fraction_static}), "
        "max_total_tokens or {pool}.max_running_requests, or raise tp_size ({tp_size})",
    ),
    (
        r"tp_size == 0|(?:is not|must be) divisible by .*(?:tp|tensor)|is not divisible by",
        "the model does not divide by {pool}.args.tp_size ({tp_size}): use a divisor of "
        "its attention heads and of its layers' width",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device",
        "there are fewer GPUs than the engines of this node take: each takes tp_size ({tp_size}) "
        "of them; see {pool}.resources.gpus_per_node",
    ),
    (
        r"No module named '?sglang",
        "{pool}.resources.python names an interpreter without SGLang",
    ),
    (
        r"No module named '?relax_hpc",
        "{pool}.resources.python names an interpreter without this package",
    ),
    (
        r"error: unrecognized arguments|error: argument --",
        "SGLang refused an argument of {pool}.args",
    ),
)
"""Patterns, and remedies to be filled in with the engine's arguments; the first that fits counts,
so what is more special stands above."""


def phase(output: str) -> str:
    """Says what a server is doing, by its `output`. The newest marker counts: it may repeat."""
    found = [(output.rfind(marker), doing) for marker, doing in _PHASES if marker in output]
    return max(found)[1] if found else "importing"


def port_taken(output: str) -> bool:
    """Whether somebody else got hold of a port first; another attempt takes others."""
    return _PORT_TAKEN.search(output) is not None


def remedy(output: str, engine_args: PassThrough, pool: str = "engines.rollout") -> str:
    """Says what to change about a start that ended with `output`; "" if it says nothing known."""
    values = {
        "mem_fraction_static": engine_args.get("mem_fraction_static", "unset"),
        "tp_size": engine_args.get("tp_size", 1),
        "pool": pool,
    }
    for pattern, words in _CAUSES:
        if re.search(pattern, output, re.IGNORECASE):
            return words.format(**values)
    if port_taken(output):
        return "a port was taken by somebody else"
    return ""
