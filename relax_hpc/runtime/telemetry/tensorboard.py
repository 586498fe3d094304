"""Writes TensorBoard files while the run goes on.

Every writer begins a file with all points so far, preceded by a mark that makes readers forget
earlier files. So an interrupted file does no harm.
"""

import html
import io
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from relax_hpc.runtime.files.storage import delete, move, names, patiently
from relax_hpc.runtime.telemetry.history import Point, Rewind

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

_NAME = "events.out.tfevents."
"""Prefix of such files."""
_VERSION = "brain.Event:2"
"""File version with which a mark makes readers forget points of that step and later ones."""


class Chart(NamedTuple):
    """Curves in one picture."""

    title: str
    tags: Sequence[str]
    """Regular expressions."""


class Text(NamedTuple):
    tag: str
    step: int
    text: str
    """Plain: no HTML and no Markdown."""
    time: float


class TensorBoard:
    """Appends to a file in a folder, which exists from the first `publish` on."""

    def __init__(self, folder: Path) -> None:
        # What torch.utils.tensorboard writes with; that would take seconds to import torch.
        from tensorboard.summary.writer.record_writer import RecordWriter

        patiently(folder, partial(folder.mkdir, parents=True, exist_ok=True))
        # A reader takes files in the order of their names.
        name = f"{_NAME}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        raw = patiently(folder, lambda: _PatientFile(_draft(folder), "x"))
        self._draft, self._file = Path(str(raw.name)), io.BufferedWriter(raw)
        self._records = RecordWriter(self._file)
        self._is_published = False
        self._event(0, time.time(), file_version=_VERSION)
        self.take([Rewind(-1)])

    def take(self, points: Iterable[Point | Rewind]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            if isinstance(point, Rewind):
                mark = SessionLog(status=SessionLog.START)
                self._event(point.step + 1, time.time(), session_log=mark)
            else:
                value = Summary.Value(tag=point.tag, simple_value=point.value)
                self._event(point.step, point.time, summary=Summary(value=[value]))

    def say(self, text: Text) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        shown = f"<pre>{html.escape(text.text, quote=False)}</pre>"
        value = _tensor(text.tag, shown.encode(), SummaryMetadata(plugin_data=plugin))
        self._summary(text.step, text.time, [value])

    def describe(
        self, name: str, settings: Mapping[str, bool | float | str], metrics: Sequence[str],
        charts: Mapping[str, Sequence[Chart]],
    ) -> None:  # fmt: skip
        """Writes hyperparameters for comparing runs, and the layout of the first pictures.

        Args:
            metrics: tags shown beside the settings.
            charts: by heading.
        """
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        experiment = plugin_data_pb2.HParamsPluginData(
            experiment=api_pb2.Experiment(
                name=name,
                hparam_infos=[api_pb2.HParamInfo(name=key, type=_type(value))
                              for key, value in settings.items()],
                metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=each))
                              for each in metrics],
            )
        )  # fmt: skip
        start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
        for key, value in settings.items():
            field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(start.hparams[key], field, value)
        session = plugin_data_pb2.HParamsPluginData(session_start_info=start)
        values = [
            _tensor(tag, None, metadata.create_summary_metadata(data))
            for tag, data in (
                (metadata.EXPERIMENT_TAG, experiment),
                (metadata.SESSION_START_INFO_TAG, session),
            )
        ]
        self._summary(0, time.time(), [*values, _layout(charts)])

    def end(self, *, failed: bool) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        made = metadata.create_summary_metadata(data)
        value = _tensor(metadata.SESSION_END_INFO_TAG, None, made)
        self._summary(0, time.time(), [value])

    def publish(self) -> None:
        """Flushes, so that readers on other nodes see all points."""
        self._file.flush()
        patiently(self.path, lambda: os.fsync(self._file.fileno()))
        if self._is_published:
            return
        move(self._draft, self.path)
        self._is_published = True
        # A reader that is in the file before this one could not go on from it if it were gone.
        folder = self.path.parent
        there = [name for name in names(folder) if name.startswith(_NAME)]
        for old in there[:-2]:
            delete(folder / old)

    def close(self) -> None:
        self._file.close()
        delete(self._draft)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _summary(self, step: int, time: float, values: "Sequence[Summary.Value]") -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event(step, time, summary=Summary(value=values))

    def _event(self, step: int, time: float, **content: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        record = Event(wall_time=time, step=step, **content)
        self._records.write(record.SerializeToString())


def _draft(folder: Path) -> Path:
    """Returns a new name per attempt: one that seemed to fail may have created its file."""
    return folder / f".{secrets.token_hex(8)}.draft"


class _PatientFile(io.FileIO):
    """Retries writes that storage refuses."""

    def write(self, data: Any) -> int:  # noqa: ANN401
        return patiently(Path(str(self.name)), partial(super().write, data))


def _tensor(tag: str, text: bytes | None, metadata: "SummaryMetadata") -> "Summary.Value":
    """Makes a tensor of one string, or empty."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR

    tensor = NULL_TENSOR if text is None else TensorProto(dtype=DT_STRING, string_val=[text])
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _layout(charts: Mapping[str, Sequence[Chart]]) -> "Summary.Value":
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=title,
                chart=[
                    layout_pb2.Chart(
                        title=each.title, multiline=layout_pb2.MultilineChartContent(tag=each.tags)
                    )
                    for each in under
                ],
            )
            for title, under in charts.items()
        ]
    )
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME)
    data = SummaryMetadata(plugin_data=plugin)
    return _tensor(metadata.CONFIG_SUMMARY_TAG, layout.SerializeToString(), data)


def _type(value: bool | float | str) -> int:
    from tensorboard.plugins.hparams import api_pb2

    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    return int(kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
