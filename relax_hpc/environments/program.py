"""An agent of the user's as an episode: a program that talks to the policy over the chat API."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.config.rollout import ProgramConfig
from relax_hpc.engines.child import without_mpi
from relax_hpc.environments.base import Outcome
from relax_hpc.environments.chat_api.server import Served, serving
from relax_hpc.environments.program_process import ProgramProcess, running
from relax_hpc.environments.session import Session
from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts.source import Prompt
from relax_hpc.scratch import scratch_folder

TICK_S = 0.25
"""Time between looks at a program that runs."""
_WORDS = 300
_HERE = "127.0.0.1"


class ProgramError(Exception):
    """A program failed. It is the reason why its episode has no score."""


class Program:
    """Starts the job's program for each episode."""

    def __init__(self, config: ProgramConfig | None) -> None:
        """Starts none yet.

        Raises:
            ConfigError: there is no such program, or it cannot be started.
        """
        assert config is not None, "the job was looked through"
        _check(config)
        self._config = config

    async def rollout(self, prompt: Prompt, session: Session) -> Outcome:
        with scratch_folder("episode") as folder:
            places = {"task": folder / "task.json", "outcome": folder / "outcome.json"}
            places["task"].write_text(json.dumps(task_of(prompt, session), default=str))
            words = [_filled(word, places) for word in self._config.command]
            async with (
                serving(session) as served,
                running(words, self._config.folder, _environment(served)) as program,
            ):
                try:
                    await self._wait(program, served)
                finally:  # before it is asked to end: it might ask for some last words
                    await served.end()
                end, said = program.end, _last(await program.last_words())
            return _outcome(places["outcome"], served, end, said)

    async def _wait(self, program: ProgramProcess, served: Served) -> None:
        """Waits until it has ended; not for what it does while engines do not answer."""
        session, spent_s = served.session, 0.0
        while not await program.has_ended(TICK_S):
            spent_s += TICK_S * (not served.is_asked)
            if session.failure is not None:
                break
            if spent_s >= self._config.timeout_s:
                said = _last(await program.last_words())
                raise ProgramError(f"took longer than {self._config.timeout_s} s{said}")
        if session.failure is not None:
            raise session.failure


def task_of(prompt: Prompt, session: Session) -> dict[str, Any]:
    """Tells a program of its episode."""
    return {
        "messages": prompt.messages,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "tools": prompt.tools,
        "source": prompt.source,
        "seed": session.seed,
    }


def _check(config: ProgramConfig) -> None:
    folder, name = config.folder, config.command[0]
    if not folder.is_dir():
        raise ConfigError(f"rollout.program.folder = {str(folder)!r}: no such folder; name one")
    path = folder / name if "/" in name else None
    if path is None and shutil.which(name) is None:
        raise ConfigError(
            f"rollout.program.command = {shown(config.command)}: no program {name} is on the PATH; "
            "name its file"
        )
    if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
        what = "may not be executed; chmod +x it" if path.is_file() else "no such file; correct it"
        raise ConfigError(f"rollout.program.command = {shown(config.command)}: {path}: {what}")


def _filled(word: str, places: Mapping[str, Path]) -> str:
    for name, path in places.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


def _environment(served: Served) -> dict[str, str]:
    """The variables of a program: a proxy of the site does not know this address."""
    made = without_mpi(os.environ)
    for name in ("no_proxy", "NO_PROXY"):
        made[name] = ",".join(filter(None, [made.get(name), _HERE]))
    return made | {"OPENAI_BASE_URL": served.base_url, "OPENAI_API_KEY": served.api_key}


def _outcome(path: Path, served: Served, end: str, said: str) -> Outcome:
    """The outcome of a program that has ended."""
    if not served.num_replies:
        raise ProgramError(f"{end or 'ended'} and has had no reply of the policy{said}")
    try:
        text = path.read_text()
    except FileNotFoundError:
        if end:
            raise ProgramError(f"{end}{said}") from None
        return Outcome()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"its outcome cannot be read: {error}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"its outcome is no JSON: {error}{said}") from None
    if not isinstance(found, dict) or found.keys() - set(Outcome._fields):
        raise ProgramError(f"its outcome is {shown(found)}; write rewards and metrics by name")
    return Outcome(**found)


def _last(words: str) -> str:
    """The end of what a program said, on a line, as a message goes on with it."""
    line = re.sub(r"\s+", " ", words).strip()
    return f"; it said: {line[-_WORDS:]}" * bool(line)
