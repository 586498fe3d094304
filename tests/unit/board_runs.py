"""Runs of which boards show something, as their events."""

import json

from job_trees import job_of
from tensorboard.backend.event_processing import plugin_event_accumulator as shown
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc.runtime.paths import RunPaths


def make(folder, **sections):
    """A run directory; a section that is None is not in its job."""
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    config = job_of(**{"eval": {"heldout": {"path": "h"}, "other": {"path": "o"}}} | sections)
    paths.config.write_text(config.model_dump_json())
    return paths, config


def event(kind, time, role="actor", rank=0, **fields):
    return {"time": time, "role": role, "rank": rank, "pid": 1, "event": kind} | fields


def step(number, time, reward, **fields):
    return event("step", time, step=number, **{"reward/mean": reward} | fields)


def evaluation(version, correct, time, *, number, rank=0, when="during", name="heldout", tasks=1):
    return event("eval", time, "rollout", rank, name=name, headline=name == "heldout", when=when,
                 number=number, version=version, version_max=version, correct=correct,
                 num_samples=4, tasks=tasks)  # fmt: skip


def write(paths, *events):
    for record in events:
        path = paths.events(record["role"], record["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read(folder):
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def curves(view):
    return {
        tag: [(point.step, point.value) for point in view.Scalars(tag)]
        for tag in view.Tags()["scalars"]
    }


def texts(folder, tag):
    """Texts as TensorBoard's own server has them; `read` gives no text up at a mark."""
    view = shown.EventAccumulator(str(folder)).Reload()
    return [(each.step, each.tensor_proto.string_val[0].decode()) for each in view.Tensors(tag)]
