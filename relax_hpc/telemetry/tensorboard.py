"""TensorBoard's view of a run, drawn again from the events whenever it is asked for."""

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.paths import RunPaths
from relax_hpc.telemetry import history
from relax_hpc.telemetry.events import Event, read_events

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write(run_dir: Path) -> Path:
    """Makes `tensorboard/` anew: scalars of every step, held-out rewards or losses, shard rewards
    and metrics, and, over seconds instead of steps, what engines did.

    It is built beside the old one and put in its place, so the folder never holds half a run, and
    a step that was trained twice is drawn once.
    """
    # What torch.utils.tensorboard writes with; that would take seconds to import torch.
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    paths = RunPaths(run_dir)
    events = read_events(paths.events_folder)
    draft = paths.tensorboard.with_name(f".{paths.tensorboard.name}.{os.getpid()}")
    with closing(EventFileWriter(str(draft))) as writer:
        for done in history.steps(events):
            for tag, value in history.numbers(done).items():
                _scalar(writer, tag, value, done["step"], done["time"])
        for sent in history.publications(events):
            for tag, value in history.numbers(sent).items():
                _scalar(writer, tag, value, sent["step"], sent["time"])
        for point in history.heldout(events, every_set=True):
            _scalar(writer, f"eval/{point.name}_reward", point.reward, point.version, point.time)
        for measured in history.heldout_losses(events):
            loss, step = measured["loss"], measured["step"]
            _scalar(writer, "eval/heldout_loss", loss, step, measured["time"])
        _write_loads(writer, events)
        _write_shards(writer, events)
    shutil.rmtree(paths.tensorboard, ignore_errors=True)
    draft.rename(paths.tensorboard)
    return paths.tensorboard


def _write_shards(writer: "EventFileWriter", events: Sequence[Event]) -> None:
    for number, shard in enumerate(history.shards(events)):
        _scalar(writer, "rollout/shard_reward", shard["reward/mean"], number, shard["time"])
        for tag in [name for name in shard if name.startswith(("parts/", "rollout/"))]:
            _scalar(writer, tag, shard[tag], number, shard["time"])


def _write_loads(writer: "EventFileWriter", events: Sequence[Event]) -> None:
    for load in history.loads(events):
        seconds = load["time"] - events[0]["time"]
        for name, value in history.load_numbers(load).items():
            tag = f"engines/{load['id']}/task{load['rank']}/{name}"
            _scalar(writer, tag, value, round(seconds), load["time"])


def _scalar(
    writer: "EventFileWriter", tag: str, value: float | None, step: int, time: float
) -> None:
    if value is None:  # it was not finite
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalar = Summary.Value(tag=tag, simple_value=value)
    writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=[scalar])))
