"""A few prompts and responses of a run, for who looks at its curves."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import RelaxError
from relax_hpc.paths import RunPaths
from relax_hpc.printable import printable
from relax_hpc.telemetry.events import Event
from relax_hpc.telemetry.tensorboard import Text
from relax_hpc.viewer.asked import Asked
from relax_hpc.viewer.groups import Row
from relax_hpc.viewer.run import Sight
from relax_hpc.viewer.terminal import facts

log = logging.getLogger(__name__)

_EVERY_S = 300.0
"""Seconds between looks at what is trained on, the first of them included: it takes the model's
tokenizer."""
_RESPONSES = 4
_TOKENS, _LETTERS = 400, 2000
"""Most of a text that is shown: the first and the last."""


class Samples:
    """Takes the first responses of each evaluation, and now and then a group that is trained on."""

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        self._paths, self._config = paths, config
        self._awaited: list[Event] = []
        self._seen = set[tuple[str, str, int]]()
        self._next_look = time.monotonic() + _EVERY_S

    def take(self, events: Sequence[Event], step: int) -> Iterator[Text]:
        """Args:
        events: that are new.
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
            yield from self._trained_on(step)
            self._next_look = time.monotonic() + _EVERY_S

    def _is_shown(self, event: Event) -> bool:
        """Whether it is the first task's share of an evaluation, told for the first time."""
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
            with path.open() as file:
                rows = [json.loads(line) for _, line in zip(range(_RESPONSES), file, strict=False)]
        except FileNotFoundError:
            return None
        said = [
            f"prompt {row['prompt']}, sample {row['sample']}: {_score(row)}, "
            f"{row['finish']}, {row['num_tokens']} tokens\n{_shortened(' ... '.join(row['texts']))}"
            for row in rows
        ]
        return Text(f"eval/{name}/responses", max(version, 0), "\n\n".join(said), event["time"])

    def _trained_on(self, step: int) -> Iterator[Text]:
        try:
            for group in self._sight.view(Asked("newest", 1), _TOKENS).groups:
                parts = [_prompt_and_response(row) for row in group.rows[:_RESPONSES]]
                said = f"prompt group {group.guid}\n" + "\n\n".join(parts)
                yield Text("rollout/responses", step, said, time.time())
        except RelaxError as error:
            log.warning("no samples of step %d are shown: %s", step, error)

    @cached_property
    def _sight(self) -> Sight:
        return Sight(self._paths.root)


def _count(event: Event) -> int:
    return int(event["num_samples"]) + int(event.get("num_masked", 0))


def _score(row: Mapping[str, Any]) -> str:
    return "no score" if row["score"] is None else f"score {row['score']:.4g}"


def _prompt_and_response(row: Row) -> str:
    head, tail = ("".join(token.text for token in part) for part in (row.head, row.tail))
    between = f" [... {row.left_out} tokens ...] " if row.left_out else ""
    prompt = f"{row.prompt}\n" if row.prompt else ""
    return f"{prompt}{facts(row)}\n{head}{between}{tail}"


def _shortened(text: str) -> str:
    if len(text) > _LETTERS:
        half, left_out = _LETTERS // 2, len(text) - _LETTERS
        text = f"{text[:half]} [... {left_out} letters ...] {text[-half:]}"
    return printable(text)
