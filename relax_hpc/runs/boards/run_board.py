"""Keeps a run's TensorBoard up to date, or makes all of it at once.

Includes sample prompts and responses, hyperparameters for comparing runs, and a layout.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.data.records import PromptRecord
from relax_hpc.errors import RelaxError
from relax_hpc.runs.answers import in_words
from relax_hpc.runs.viewer import GroupQuery
from relax_hpc.runs.viewer.run import RunViewer, facts
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import curve
from relax_hpc.runtime.telemetry.events import Event, EventTail
from relax_hpc.runtime.telemetry.history import Point, Points, Rewind
from relax_hpc.runtime.telemetry.tensorboard import Chart, TensorBoard, Text
from relax_hpc.runtime.text import printable, shorten

log = logging.getLogger(__name__)

_EVERY_S = 300.0
"""Seconds between looks at training samples, also before the first: loading the tokenizer is
slow."""
_RESPONSES = 4
_TOKENS, _LETTERS = 400, 2000
"""Most tokens and characters shown of a text: its beginning and end."""


class Samples:
    """Takes the first responses of each evaluation, and now and then a training group."""

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        self._paths, self._config = paths, config
        self._awaited: list[Event] = []
        self._seen = set[tuple[str, str, int]]()
        self._next_look = time.monotonic() + _EVERY_S

    def take(self, events: Sequence[Event], step: int) -> Iterator[Text]:
        """Args:
        events: new ones.
        step: the newest.
        """
        self._awaited += [event for event in events if self._is_shown(event)]
        left = []
        for event in self._awaited:
            if (text := self._of_evaluation(event)) is None:
                left.append(event)  # its samples are written a moment later
            else:
                yield text
        self._awaited = left
        if step and time.monotonic() >= self._next_look and isinstance(self._config, RunConfig):
            yield from self._find_trained(step)
            self._next_look = time.monotonic() + _EVERY_S

    def _is_shown(self, event: Event) -> bool:
        """Whether it is the first task's share of an evaluation, reported for the first time."""
        if event["event"] != "eval" or event["rank"] or not _count(event):
            return False
        evaluation = event["name"], event["when"], event["number"]
        is_new = evaluation not in self._seen
        self._seen.add(evaluation)
        return is_new

    def _of_evaluation(self, event: Event) -> Text | None:
        name, version = event["name"], event["version"]
        path = self._paths.eval_rows(name, version, event["when"], event["number"], 0)
        try:
            with path.open(encoding="utf-8") as file:
                rows = [json.loads(line) for _, line in zip(range(_RESPONSES), file, strict=False)]
        except FileNotFoundError:
            return None
        said = [
            f"prompt {row['prompt']}, sample {row['sample']}: {_score(row)}, "
            f"{row['finish']}, {row['num_tokens']} tokens\n{_data_of(row)}"
            f"{printable(shorten(' ... '.join(row['texts']), _LETTERS))}"
            for row in rows
        ]
        return Text(f"eval/{name}/responses", max(version, 0), "\n\n".join(said), event["time"])

    def _find_trained(self, step: int) -> Iterator[Text]:
        try:
            for group in self._sight.view(GroupQuery("newest", 1), _TOKENS).groups:
                parts = [
                    f"{row.prompt}\n" * bool(row.prompt) + f"{facts(row)}\n{row.response}"
                    for row in group.rows[:_RESPONSES]
                ]
                said = f"prompt group {group.guid}\n{_lines(in_words(group.data_row))}"
                said += "\n\n".join(parts)
                yield Text("rollout/responses", step, said, time.time())
        except RelaxError as error:
            log.warning("no samples of step %d are shown: %s", step, error)

    @cached_property
    def _sight(self) -> RunViewer:
        return RunViewer(self._paths.root)


def _count(event: Event) -> int:
    return int(event["num_samples"]) + int(event.get("num_masked", 0))


def _score(row: Mapping[str, Any]) -> str:
    return "no score" if row["score"] is None else f"score {row['score']:.4g}"


def _data_of(row: Mapping[str, Any]) -> str:
    """Formats answer and metadata of a held-out sample; an earlier version wrote none."""
    known = PromptRecord("", row.get("answer", ""), metadata=row.get("metadata", {}))
    return _lines(in_words(known))


def _lines(said: Mapping[str, str]) -> str:
    return "".join(f"{name}: {text}\n" for name, text in said.items())


Setting = bool | float | str

_LEFT_OUT = ("run_root", "launch", "notify", "boards", "bus", "resources")
"""Keys about where and how a run runs, rather than what it computes."""

UNLEARNED = (
    "rollout/response/truncated", "reward/groups/no_spread", "reward/errors", "staleness/over_age",
    "loss/(masked_fraction|clip_fraction|importance_rejected)",
)  # fmt: skip
"""Tags of what `roles.training.unlearned` tells."""
CHARTS: Mapping[str, list[Chart]] = {
    "The run": [
        Chart("reward in training", ["reward/mean"]),
        Chart("held-out", ["eval/.*/(reward|loss)"]),
        Chart("loss", ["loss/total"]),
        Chart("gradient norm", ["trainer/grad_norm"]),
        Chart("entropy", ["loss/entropy"]),
        Chart("tokens of a response", ["rollout/response/.*"]),
        Chart("staleness", ["staleness/mean", "staleness/max"]),
        Chart("not learned from", UNLEARNED),
    ],
    "Speed": [
        Chart("trained tokens per second, with prompts", ["trainer/tokens_per_s"]),
        Chart("seconds of a step", ["time/(step|wait|forward_backward|update|publish|save)"]),
        Chart("seconds of an update of the engines", ["sync/(total|paused|wire)"]),
    ],
}


def settings(config: JobConfig) -> dict[str, Setting]:
    """Values of keys by dotted name; lists as text."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def metrics(config: JobConfig) -> list[str]:
    """Tags by which runs are compared."""
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


_CURVE_EVERY_S = 60.0


class Board(ABC):
    """Takes what is new of a run: each event, point of a curve and sample text once."""

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        self._paths, self._config = paths, config
        self._tail = EventTail(paths.events_folder)
        self._points = Points()
        self._samples = Samples(paths, config)

    @property
    def step(self) -> int:
        return self._points.step

    @property
    def num_files(self) -> int:
        """Number of event files."""
        return self._tail.num_files

    def update(self) -> list[Event]:
        """Takes the new events, and returns them.

        Takes a limited number; call it until it returns none.
        """
        events = self._tail.read()
        points = list(self._points.take(events))
        self._take(events, points, list(self._samples.take(events, self.step)))
        return events

    def update_all(self) -> None:
        while self.update():
            pass

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Takes the rest; the run is over."""

    @abstractmethod
    def _take(
        self, events: Sequence[Event], points: Sequence[Point | Rewind], texts: Sequence[Text]
    ) -> None: ...


class RunBoard(Board):
    """Draws events as they come: `tensorboard/`, and a picture of the curve.

    Nothing is written before the first point.
    """

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        super().__init__(paths, config)
        self._said: list[Text] = []
        self._drawn: list[Event] = []
        """Events for the picture, kept to avoid rereading."""
        self._board: TensorBoard | None = None
        self._is_published = True
        self._pictured_step, self._next_picture = 0, time.monotonic() + _CURVE_EVERY_S

    def _take(
        self, events: Sequence[Event], points: Sequence[Point | Rewind], texts: Sequence[Text]
    ) -> None:
        self._drawn += curve.drawn_of(events)
        if points or texts:
            board = self._open()
            board.take(points)
            back = [point.step for point in points if isinstance(point, Rewind)]
            void = [text for text in self._said if back and text.step > min(back)]
            for text in [*void, *texts]:
                board.say(text)
            self._said += texts
            self._is_published = False
        if not self._is_published and not self._tail.is_behind:  # readers forget the file before
            self._open().publish()
            self._is_published = True
        if time.monotonic() >= self._next_picture and not self._tail.is_behind:
            self.picture()

    def end(self, *, failed: bool) -> None:
        """Draws the last events, and records that it is complete."""
        self.update_all()
        if self._board is not None:
            self._board.end(failed=failed)
            self._board.publish()
            self._board.close()
            made = {"file": self._board.path.name, "sizes": self._tail.sizes, "failed": failed}
            write_json(self._paths.tensorboard_made, made)
        self.picture()

    def picture(self) -> None:
        """Draws the curve if it has new steps."""
        self._next_picture = time.monotonic() + _CURVE_EVERY_S
        if self.step != self._pictured_step:
            self._pictured_step = self.step
            draw = curve.plot if isinstance(self._config, RunConfig) else curve.plot_loss
            draw(self._paths.root, self._drawn)

    def _open(self) -> TensorBoard:
        if self._board is None:
            self._board = TensorBoard(self._paths.tensorboard)
            self._board.describe(
                self._config.name, settings(self._config),
                metrics(self._config), CHARTS,
            )  # fmt: skip
        return self._board


def is_complete(paths: RunPaths, *, failed: bool) -> bool:
    """Whether `RunBoard.end` has drawn everything."""
    made = read_json(paths.tensorboard_made)
    if made is None or made["failed"] != failed:
        return False
    sizes = {path.name: _size(path) for path in paths.events_folder.glob("*.jsonl")}
    there = {name: size for name, size in sizes.items() if size}
    return (paths.tensorboard / made["file"]).exists() and bool(there == made["sizes"])


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
