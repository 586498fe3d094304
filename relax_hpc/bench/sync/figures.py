"""The measurements of `bench.sync`, and their words."""

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_hpc.bench.report import machine
from relax_hpc.records import write_json
from relax_hpc.telemetry.tables import aligned

_PARTS = (
    "gather",
    "write",
    "join",
    "pause",
    "prepare",
    "idle",
    "received",
    "load",
    "wire",
    "resume",
)


@dataclass
class Update:
    """One version on its way; seconds."""

    version: int
    num_bytes: int
    paused: float
    """Seconds that engines stood still."""
    total: float
    """Seconds from the first gathered tensor to the last engine that resumed."""
    parts: dict[str, float]
    """`sync/...` of docs/architecture.md."""
    began: float = 0.0
    """Seconds since the epoch."""
    falling_asleep: float = 0.0
    """Seconds before it, of engines on the trainer's GPUs."""
    free_gib: tuple[float, float] | None = None
    """Free memory of the first of these GPUs, before and after that."""


@dataclass
class Gap:
    """Trainer's logprob minus the engine's, over sampled tokens, in nats."""

    version: int
    num_tokens: int
    mean: float
    """Mean of its absolute value."""
    largest: float
    k3: float
    """Mean of exp(d) - 1 - d, an estimate of KL(engine || trainer)."""


@dataclass
class Figures:
    """One measurement."""

    shape: str
    trainer: str
    engines: str
    in_flight: int
    updates: list[Update]
    gaps: list[Gap]
    equal: bool
    """Whether engines held what was sent, after the first and the last version."""
    wire_gb_per_s: float
    """Rate of a broadcast of 1 GiB between the same GPUs, with nothing else to do; 0 if not
    measured."""
    failed: int = 0
    """Requests that ended in an error."""
    tokens_per_s: float = 0.0
    """Tokens per second that engines sampled meanwhile, from the second update to the last; 0 if
    not measured."""
    undisturbed_tokens_per_s: float = 0.0
    """Tokens per second that engines sampled for as long without updates."""


def progress(found: Update | Gap) -> str:
    """A line of what was measured just now."""
    if isinstance(found, Gap):
        return _line_of(found)
    parts = ", ".join(
        f"{name} {1e3 * found.parts[name]:.1f}" for name in _PARTS if name in found.parts
    )
    return (
        f"version {found.version}: paused {1e3 * found.paused:.1f} ms, total "
        f"{1e3 * found.total:.1f} ms ({parts})"
    )


def show(figures: Figures, json_file: Path | None) -> str:
    """A line per version, and the medians; if asked for, all of it as JSON."""
    heads = ("version", "paused", "total", *_PARTS, "GB/s")
    lines: list[tuple[str, ...]] = [heads]
    for update in figures.updates:
        rate = update.num_bytes / 1e9 / _on_the_wire(update)
        parts = [f"{1e3 * update.parts.get(name, 0.0):.1f}" for name in _PARTS]
        whole = [f"{1e3 * update.paused:.1f}", f"{1e3 * update.total:.1f}"]
        lines.append((str(update.version), *whole, *parts, f"{rate:.0f}"))
    table = aligned(lines)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **asdict(figures)})
    gaps = map(_line_of, figures.gaps)
    return "\n".join([f"{machine()}; milliseconds", *table, *_summary(figures), *gaps])


def _line_of(gap: Gap) -> str:
    return (
        f"logprobs at version {gap.version}, {gap.num_tokens} tokens: mean |d| {gap.mean:.2e}, "
        f"largest {gap.largest:.2e}, k3 {gap.k3:.2e}"
    )


def _summary(figures: Figures) -> list[str]:
    later = figures.updates[1:]
    paused = statistics.median(update.paused for update in later)
    total = statistics.median(update.total for update in later)
    size = later[0].num_bytes / 1e9
    wire_s = statistics.median(map(_on_the_wire, later))
    lines = [
        f"{figures.shape}, trainer {figures.trainer} -> {figures.engines}, {size:.2f} GB, "
        f"{figures.in_flight} requests in flight: paused {1e3 * paused:.1f} ms, total "
        f"{1e3 * total:.1f} ms ({total / paused:.2f} x), {size / wire_s:.0f} GB/s",
        f"{figures.failed} requests failed, weights {'equal' if figures.equal else 'DIFFER'}",
    ]
    if calm := figures.undisturbed_tokens_per_s:
        span = (later[-1].began - later[0].began) / (len(later) - 1)
        lines.append(
            f"engines: {figures.tokens_per_s:.0f} tokens/s with an update every {span:.1f} s, "
            f"{calm:.0f} without: {figures.tokens_per_s / calm:.3f}"
        )
    if memory := [update.free_gib for update in later if update.free_gib]:
        before, after = memory[-1]
        parts = {
            name: statistics.median(update.parts.get(f"wake_{name}", 0.0) for update in later)
            for name in ("weights", "kv_cache")
        }
        slept = statistics.median(update.falling_asleep for update in later)
        lines.append(
            f"engines fall asleep in {1e3 * slept:.0f} ms, take memory of weights back in "
            f"{1e3 * parts['weights']:.0f} ms, of the cache in {1e3 * parts['kv_cache']:.0f} ms; "
            f"GiB free on the GPU: {before:.1f} while they are awake, {after:.1f} asleep"
        )
    if figures.wire_gb_per_s:
        fraction = size / wire_s / figures.wire_gb_per_s
        lines.append(f"a bare broadcast: {figures.wire_gb_per_s:.0f} GB/s; {fraction:.0%} of it")
    return lines


def _on_the_wire(update: Update) -> float:
    """Seconds from the first byte to the last, as engines saw it, if they tell. Where nothing is on
    a wire, until the last one is in its place."""
    if "wire" not in update.parts:  # engines load files
        return update.parts["load"]
    if "wake_weights" in update.parts:
        return update.parts["wire"]
    return update.parts.get("received") or update.parts["wire"]
