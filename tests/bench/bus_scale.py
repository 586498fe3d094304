"""The simulation as docs/bus-scale.md shows it: tables in Markdown, and a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bus_flow
from bus_flow import Outage
from bus_simulation import (
    BASE,
    COST,
    READ,
    SIDECAR,
    Load,
    Site,
    breaking_point,
    credit_utilization,
    operations,
    per_shard,
    publish_latency,
    sequencer,
    utilization,
)

from relax_hpc.telemetry import picture

STEP_S = 60.0
VARIANTS: dict[str, Load] = {
    "as built, 5 s a shard, 1 sidecar": Load(1),
    "no sidecar": Load(1, sidecars=0),
    "3 sidecars": Load(1, sidecars=3),
    "30 s a shard": Load(1, seconds_per_shard=30),
    "60 s a shard": Load(1, seconds_per_shard=60),
    "60 s a shard, credits polled 20 times a second": Load(
        1, seconds_per_shard=60, credit_polls_per_s=20
    ),
    "8 ranks read each shard, not one": Load(1, readers=8),
    "O_DIRECT refused: logs opened anew for each poll": Load(1, direct=False),
    "the same, credits polled every 10 s": Load(1, direct=False, credit_polls_per_s=0.1),
}
FLOWS: dict[str, tuple[Load, Outage | None]] = {
    "1,000 producers, 5 s a shard": (Load(1000), None),
    "3,000, 5 s": (Load(3000), None),
    "10,000, 5 s": (Load(10_000), None),
    "10,000, 40 s": (Load(10_000, seconds_per_shard=40), None),
    "312 producers of 32 engines each, 5 s": (Load(312, trajectories_per_s=160), None),
    "1,000; metadata server stands still for 120 s": (
        Load(1000),
        Outage("metadata server", 600, 720),
    ),
    "1,000; sequencer down for 180 s": (Load(1000), Outage("sequencer", 600, 780)),
}


def report(site: Site) -> str:
    """All tables."""
    tables = {
        "Metadata operations per shard": _operations(),
        "Load": _loads(site),
        "Producers at which each part gives out": _breaking_points(site),
        "Flow": _flows(site),
    }
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items())


def plot(path: Path, site: Site) -> None:
    """Draws how the parts fill up, and how far behind the sequencer is, over the producers."""
    counts = [round(10 ** (1 + i / 20)) for i in range(81)]
    figure = picture.figure(11, 4.2, dpi=130)
    left, right = figure.subplots(1, 2)
    for seconds, style in ((5, "-"), (40, "--")):
        loads = [Load(n, seconds_per_shard=seconds) for n in counts]
        left.plot(counts, [utilization(load, site) for load in loads], style, color="#1f5fa8",
                  label=f"metadata server, {seconds} s a shard")  # fmt: skip
        left.plot(counts, [sequencer(load, site).busy for load in loads], style, color="#d9660f",
                  label=f"sequencer, {seconds} s a shard")  # fmt: skip
        right.plot(counts, [sequencer(load, site).delay_s for load in loads], style,
                   color="#d9660f", label=f"{seconds} s a shard")  # fmt: skip
    loads = [Load(n) for n in counts]
    left.plot(counts, [credit_utilization(load, site) for load in loads], color="#555555",
              label="file of credits")  # fmt: skip
    left.axhline(1, color="black", linewidth=0.8)
    for axes, title in ((left, "share of what it can do"), (right, "commit to sequencer [s]")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("producers, one sidecar role")
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    left.set_ylim(1e-3, 30)
    picture.save(figure, path)


def _operations() -> str:
    names = list(COST)
    rows = [
        [title, *(str(counts[name]) for name in names), str(sum(counts.values()))]
        for title, counts in (
            ("base shard: publish, delete", BASE),
            ("sidecar: open the base, publish, delete", SIDECAR),
            ("each reader of either", READ),
            ("whole life, no sidecar", per_shard(Load(1, sidecars=0))),
            ("whole life, 1 sidecar", per_shard(Load(1, sidecars=1))),
            ("whole life, 3 sidecars", per_shard(Load(1, sidecars=3))),
        )
    ]
    return _markdown(["", *names, "sum"], rows)


def _loads(site: Site) -> str:
    rows = []
    for producers in (100, 1000, 3000, 10_000):
        for seconds in (5, 40):
            load = Load(producers, seconds_per_shard=seconds)
            state, waits = sequencer(load, site), publish_latency(load, site)
            rows.append(
                [
                    f"{producers:,}",
                    f"{seconds}",
                    f"{sum(operations(load, site).values()):,.0f}",
                    _percent(utilization(load, site)),
                    f"{1e3 * waits[int(0.99 * len(waits))]:.1f}" if waits else "-",
                    _percent(credit_utilization(load, site)),
                    _percent(state.busy),
                    "without bound" if state.busy >= 1 else f"{state.delay_s:.2f}",
                    f"{load.groups_per_s * STEP_S * site.plan_bytes / 1e6:.2f}",
                ]
            )
    head = ["producers", "s per shard", "metadata ops/s", "metadata server", "publish p99 ms",
            "file of credits", "sequencer", "commit seen after s", "plan MB/step"]  # fmt: skip
    return _markdown(head, rows)


def _breaking_points(site: Site) -> str:
    rows = []
    for title, load in VARIANTS.items():
        points = breaking_point(load, site)
        rows.append([title, *(f"{count:,}" for count in points.values())])
    return _markdown(["", *breaking_point(Load(1), site)], rows)


def _flows(site: Site) -> str:
    rows = []
    for title, (load, outage) in FLOWS.items():
        flow = bus_flow.run(load, site, step_s=STEP_S, outage=outage)
        rows.append(
            [
                title,
                f"{flow.steps}/{flow.ideal_steps}",
                _percent(flow.idle),
                f"{flow.median_age_s:.0f}",
                str(flow.max_staleness),
                f"{flow.outstanding:.2f}",
                _percent(flow.paused),
            ]
        )
    head = ["", "steps done / ideal", "trainer idle", "median age s", "staleness at most",
            "batches outstanding at most", "producers paused"]  # fmt: skip
    return _markdown(head, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, default=50_000, help="creates/s of your server")
    parser.add_argument("--plot", type=Path, help="also draw a picture")
    args = parser.parse_args()
    site = Site(capacity=args.capacity)
    print(report(site))
    if args.plot:
        plot(args.plot, site)


if __name__ == "__main__":
    main()
