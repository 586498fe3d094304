"""Durable write and verified read of a text batch, against the same bytes written raw."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from relax_hpc.bench.report import Row
from relax_hpc.bus import shard_write
from relax_hpc.bus.encode import to_columns
from relax_hpc.bus.shard import Shard
from relax_hpc.schema import Columns, FinishReason, PromptGroup, Trajectory

NUM_GROUPS, SIBLINGS, MEAN_TOKENS, MAX_TOKENS = 128, 8, 4000, 8192


def measure(folder: Path | None, repeats: int) -> list[Row]:
    """Medians over `repeats`, each repeat measuring shard and raw file one after the other."""
    columns = text_batch()
    size = sum(column.nbytes for column in columns.values())
    with tempfile.TemporaryDirectory(dir=folder, prefix="relax-bench-") as scratch:
        pairs = [_round(Path(scratch), columns) for _ in range(repeats)]
    rows = []
    for name, index in (("write + fsync", 0), ("read, verified", 1)):
        ours, raw = (statistics.median(pair[index][side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[index][1] / pair[index][0] for pair in pairs)
        rows.append(Row(f"shard {name}", size / ours / 1e9, "GB/s", size / raw / 1e9, ratio))
    return rows


def text_batch() -> Columns:
    """1,024 ragged trajectories in groups of 8, up to 8k tokens."""
    rng = np.random.default_rng(0)
    groups = [
        PromptGroup(guid, [_trajectory(rng, guid, sibling) for sibling in range(SIBLINGS)])
        for guid in range(NUM_GROUPS)
    ]
    return to_columns(groups)


def _trajectory(rng: np.random.Generator, guid: int, sibling: int) -> Trajectory:
    size = int(np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.2, 0.6), 64, MAX_TOKENS))
    return Trajectory(
        guid=guid,
        sibling=sibling,
        prompt_index=guid,
        seed=sibling,
        token_ids=rng.integers(0, 150_000, size, dtype=np.int32),
        prompt_len=32,
        loss_mask=(np.arange(size) >= 32).astype(np.uint8),
        rollout_logprobs=rng.random(size, dtype=np.float32),
        version_runs=np.array([[32, 0]], dtype=np.int32),
        finish=FinishReason.STOP,
        reward=1.0,
    )


def _round(scratch: Path, columns: Columns) -> tuple[tuple[float, float], tuple[float, float]]:
    path, raw = scratch / "0.h5", scratch / "0.raw"
    write = _seconds(lambda: shard_write.write(path, columns, {"producer": "bench"}))
    write_raw = _seconds(lambda: _write_raw(raw, columns))
    read = _seconds(lambda: _read(path))
    read_raw = _seconds(raw.read_bytes)
    path.unlink()
    raw.unlink()
    return (write, write_raw), (read, read_raw)


def _write_raw(path: Path, columns: Columns) -> None:
    with path.open("wb", buffering=0) as file:
        for column in columns.values():
            file.write(column.data)
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with Shard(path) as shard:
        for name in shard.fields:
            shard.read(name)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
