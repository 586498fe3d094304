"""A run as a board describes it: the settings by which it is compared, and its first pictures."""

from collections.abc import Iterator, Mapping

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.telemetry.tensorboard import Chart

Setting = bool | float | str

_LEFT_OUT = ("run_root", "launch", "notify", "boards", "bus", "resources")
"""Sections and keys that say where and how a run runs, and not what it computes."""

CHARTS: Mapping[str, list[Chart]] = {
    "The run": [
        Chart("reward in training", ["reward/mean"]),
        Chart("held-out", ["eval/.*"]),
        Chart("loss", ["loss/total"]),
        Chart("gradient norm", ["trainer/grad_norm"]),
        Chart("entropy", ["loss/entropy"]),
        Chart("tokens of a response", ["rollout/response/.*"]),
        Chart("staleness", ["staleness/mean", "staleness/max"]),
    ],
    "Speed": [
        Chart("tokens per second", ["trainer/tokens_per_s"]),
        Chart("seconds of a step", ["time/(step|wait|forward_backward|update|publish|save)"]),
        Chart("seconds of an update of the engines", ["sync/(total|paused|wire)"]),
    ],
}


def settings(config: JobConfig) -> dict[str, Setting]:
    """Values of keys by dotted name; a list is text."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def metrics(config: JobConfig) -> list[str]:
    """Tags of the figures by which runs are compared."""
    if not isinstance(config, RunConfig):
        return ["eval/heldout/loss", "loss/total"]
    return [*(f"eval/{name}/reward" for name in config.eval), "reward/mean", "loss/total"]


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Setting]]:
    for name, value in tree.items():
        if name in _LEFT_OUT or value is None:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
