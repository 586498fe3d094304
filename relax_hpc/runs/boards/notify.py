"""Sends messages about a run to a program, a webhook or a service that Apprise knows, and progress
to the Slurm job's comment.

A failed delivery is retried three times and logged; the run is not affected. No log contains the
webhook's URL.
"""

import json
import logging
import math
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx
from tenacity import RetryError, Retrying, stop_after_attempt, wait_exponential

from relax_hpc.config.run import HTTP, JobConfig, News
from relax_hpc.errors import RelaxError
from relax_hpc.launch.states import output_of
from relax_hpc.runtime import process
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import Event
from relax_hpc.runtime.telemetry.progress import duration

log = logging.getLogger(__name__)

_APART_S = 300.0
"""Least seconds between two messages of one kind, over all attempts of the run."""
_ANSWER_S = 10.0
_TRIES, _WAIT_S = 3, 1.0
_KEEP = 0.85
"""Weight of the past in the moving average of the reward."""
_COMMENT_EVERY_S = 60.0
_MARK = "relax-hpc: "
"""Prefix of our comments; any other comment is the user's, and stays."""

Deliver = Callable[[dict[str, Any]], None]


class Notifier:
    """Sends the messages that the job requests in `[notify]`."""

    def __init__(self, paths: RunPaths, config: JobConfig) -> None:
        self._paths, self._config = paths, config
        settings = config.notify
        self._ways: dict[str, Deliver] = {}
        if settings.command:
            self._ways["notify.command"] = self._run
        if settings.webhook is not None:
            self._ways["notify.webhook"] = self._post

    def tell(self, news: News, text: str, **facts: object) -> bool:
        """Delivers a message, if requested and not just sent.

        Returns:
            Whether it was due.
        """
        if not self._ways or news not in self._config.notify.on or self._is_too_soon(news):
            return False
        message = {
            "run": self._config.name, "news": news, "text": f"{self._config.name}: {text}",
            "run_dir": str(self._paths.root), "time": time.time(), **facts,
        }  # fmt: skip
        for name, deliver in self._ways.items():
            try:
                tries = Retrying(
                    stop=stop_after_attempt(_TRIES), wait=wait_exponential(multiplier=_WAIT_S)
                )
                tries(deliver, message)
            except RetryError as error:
                log.warning("%s: %s", name, _words(error.last_attempt.exception()))
        return True

    def _is_too_soon(self, news: News) -> bool:
        told = read_json(self._paths.notified) or {}
        if time.time() - told.get(news, -math.inf) < _APART_S:
            return True
        write_json(self._paths.notified, told | {news: time.time()})
        return False

    def _run(self, message: dict[str, Any]) -> None:
        command = self._config.notify.command
        process.run(command, _ANSWER_S, given=json.dumps(message)).check_returncode()

    def _post(self, message: dict[str, Any]) -> None:
        file = self._config.notify.webhook
        assert file is not None
        url = file.read_text(encoding="utf-8").strip()
        if url.startswith(HTTP):
            httpx.post(url, json=message, timeout=_ANSWER_S).raise_for_status()
            return
        import apprise

        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it would name the URL
        service = apprise.Apprise(url)
        if not service.notify(body=message["text"], title=f"{message['run']}: {message['news']}"):
            raise NotDeliveredError


class NotDeliveredError(RelaxError):
    pass


def _words(error: BaseException | None) -> str:
    """The reason without URL or arguments, which may be secret."""
    match error:
        case httpx.HTTPStatusError():
            return f"the webhook answers {error.response.status_code}"
        case subprocess.CalledProcessError():
            return f"the program ended with exit code {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"the program did not end in {_ANSWER_S:.0f} s"
        case NotDeliveredError():
            return "the service did not take it"
        case OSError():
            return f"{error.strerror}"
    return type(error).__name__


class ProgressWatch:
    """Reports that the run began, and that the reward has stopped rising."""

    def __init__(self, notifier: Notifier, plateau_steps: int) -> None:
        self._notifier, self._plateau_steps = notifier, plateau_steps
        self._mean: float | None = None
        self._best, self._best_step, self._is_told = -math.inf, 0, False

    def begin(self, num_restarts: int) -> None:
        """Args:
        num_restarts: of the job by Slurm.
        """
        if num_restarts:
            self._notifier.tell("requeue", f"goes on after requeue number {num_restarts}")
        else:
            self._notifier.tell("start", "has started")

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["event"] == "step" and event.get("reward/mean") is not None:
                self._step(event["step"], event["reward/mean"])

    def _step(self, step: int, reward: float) -> None:
        mean = reward if self._mean is None else _KEEP * self._mean + (1 - _KEEP) * reward
        self._mean = mean
        if mean > self._best:
            self._best, self._best_step, self._is_told = mean, step, False
        since = step - self._best_step
        if self._plateau_steps and since >= self._plateau_steps and not self._is_told:
            said = f"no better reward for {since} steps: {mean:.3f}, best {self._best:.3f}"
            self._notifier.tell("plateau", said, step=step, reward=mean)
            self._is_told = True


class Comment:
    """Writes progress to a Slurm job's comment, unless a user's comment is there: at most once a
    minute, and never after a refusal."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._is_ours = job_id.isdecimal()
        self._next = 0.0

    def show(self, step: Event, num_steps: int) -> None:
        """Args:
        step: the newest.
        num_steps: of the run.
        """
        if not self._is_ours or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _COMMENT_EVERY_S
        there = output_of(["squeue", "-h", "-j", self._job_id, "-o", "%k"], _ANSWER_S)
        comments = {line.strip() for line in there.stdout.splitlines()} - {"", "(null)"}
        if there.returncode or any(not each.startswith(_MARK) for each in comments):
            self._is_ours = False
            return
        said = [f"step {step['step']} of {num_steps}"]
        if step.get("reward/mean") is not None:
            said.append(f"reward {step['reward/mean']:.3f}")
        if step.get("eta_s") is not None:
            said.append(f"{duration(step['eta_s'])} to go")
        update = [
            "scontrol",
            "update",
            f"JobId={self._job_id}",
            f"Comment={_MARK}{', '.join(said)}",
        ]
        self._is_ours = output_of(update, _ANSWER_S).returncode == 0
