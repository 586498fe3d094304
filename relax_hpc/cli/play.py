"""Shows an episode that is played before anything is queued."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig
    from relax_hpc.roles.rollout.play import Played
    from relax_hpc.schema import Trajectory
    from relax_hpc.viewer.words import Words

_STYLES = {"given": "dim", "said by the policy": "", "given by the environment": "dim"}
"""How turns of each kind are printed, in the order of `schema.TurnKind`."""


def play_episode(config: "JobConfig", replies: Sequence[str], say: Callable[[str], None]) -> None:
    """Plays an episode of a job's first prompt, and prints it on standard error.

    Args:
        config: of the job.
        replies: of the policy; its prompt's answer if there are none.
        say: is told what came of it.

    Raises:
        ConfigError: the environment or the reward fails.
    """
    from relax_hpc.config.run import RunConfig
    from relax_hpc.prompts import tokenizer
    from relax_hpc.roles.rollout import play, prompt_check
    from relax_hpc.viewer.words import Words

    if not isinstance(config, RunConfig):
        raise ConfigError("--play: a job with [sft] plays no episodes; leave it out")
    files, known = prompt_check.open_files(config), tokenizer.load(config.model.path)
    source = prompt_check.sources_of(config, files, known).train
    played = play.play(config, source, replies)
    console, words = Console(stderr=True, soft_wrap=True), Words(known.decode)
    console.print(Text(f"an episode of {played.prompt.where}:", style="bold"))
    for row in played.rows:
        _print_row(console, row, words)
    say(_outcome(played))


def _print_row(console: Console, row: "Trajectory", words: "Words") -> None:
    from relax_hpc.viewer import stretches

    if row.segment:
        console.print("a history of its own, so another sequence:", style="yellow")
    turns = [] if row.turns is None else row.turns.tolist()
    media = stretches.of_row(row)
    kinds = list(_STYLES)
    for (first, kind), (end, _) in pairwise([*turns, (len(row.token_ids), 0)]):
        tokens = row.token_ids[first:end].tolist()
        trained = ", trained on" * bool(row.loss_mask[first])
        title = f"{kinds[kind]}, {_counted(len(tokens), 'token', 's')}{trained}"
        console.print(Text(title, style="cyan"))
        text = words.text(tokens, stretches.within(media, first, end))
        console.print(Text(text, style=_STYLES[kinds[kind]]))


def _outcome(played: "Played") -> str:
    score, metrics = played.episode.score, played.episode.metrics
    calls = len(played.episode.record.calls)
    reward = f"reward {score.value:g}{_named(score.parts)}"
    if score.error is not None:
        reward = f"its reward {score.error}"
    told = f"; metrics{_named(metrics)}" if metrics else ""
    sampled = sum(int(row.loss_mask.sum()) for row in played.rows)
    if not calls:
        told += "; the policy was asked nothing, and such an episode teaches nothing"
    return (
        f"played an episode: {_counted(calls, 'repl', 'ies', 'y')}, "
        f"{_counted(sampled, 'token', 's')} trained on; {reward}{told}"
    )


def _counted(number: int, word: str, many: str, one: str = "") -> str:
    return f"{number:,} {word}{one if number == 1 else many}"


def _named(numbers: Mapping[str, float]) -> str:
    return " (" + ", ".join(f"{name} {value:g}" for name, value in numbers.items()) + ")"
