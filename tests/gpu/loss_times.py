"""`loss_times.py [TOKENS]`: what advantages and loss of every preset cost, without a model.

Milliseconds of a micro-batch, one document and a mix, as `relax-hpc bench train` measures them,
and the operations that torch is called for: with few tokens the time is that of their starts.
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.presets import PRESETS
from relax_hpc.cli.bench import train
from relax_hpc.cli.bench.train import ReplicaWork, lengths_of

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
print(f"{tokens} tokens on {device}: preset, ms of one document, of a mix, operations a call")
for preset in PRESETS:
    algorithm, times = algorithm_of(preset=preset), []
    for documents in ("one", "mix"):
        lengths = lengths_of(ReplicaWork(tokens, documents, "none", 1), 0)
        rows = train._add_advantages(train.BenchBatch(train._trajectories(320, lengths, 0), [], []))
        times.append(1e3 * train._loss_seconds(algorithm, rows, device))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train._loss_seconds(algorithm, rows, device)
    calls = sum(e.count for e in profiler.key_averages() if e.key.startswith("aten::"))
    print(f"{preset:24}{times[0]:8.2f}{times[1]:8.2f}{calls / 23:8.0f}", flush=True)
