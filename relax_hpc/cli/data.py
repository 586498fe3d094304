"""Commands on the data of a job: overlap, decoding of media, and a trial episode."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import typer

from relax_hpc.cli.arguments import AsJson, Job, Overrides
from relax_hpc.cli.lines import RowsShown, echo
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from relax_hpc.config.run import JobConfig
    from relax_hpc.data.overlap import LeftOut
    from relax_hpc.roles.rollout.play import Played
    from relax_hpc.runs.viewer.words import Words
    from relax_hpc.schema import Trajectory

data = typer.Typer()
_MOST_SHOWN = 20


@data.command("data", epilog="Example:  relax-hpc data first.toml")
def overlap(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Look through all prompts of a job: those there are twice, and held-out ones that are trained
    on."""
    import json

    from relax_hpc.config import job_file, programs
    from relax_hpc.config.run import RunConfig
    from relax_hpc.data import overlap as overlaps
    from relax_hpc.roles.rollout import prompt_check

    config = programs.find_models(job_file.load(job, overrides))
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{job}: a job with [sft] has no prompts; name another")
    found = prompt_check.overlap_of(config, prompt_check.read(config))
    if as_json:
        echo(json.dumps(overlaps.to_json(found), indent=1))
        return
    for name, each in found.sets.items():
        echo(f"eval.{name}: {each.num_prompts:,} prompts{_without(each.left_out)}")
    echo(f"prompts.train: {found.num_train:,} prompts{_without(found.left_out)}")
    lines = overlaps.lines(found)
    echo("\n".join(lines or ["no prompt is there twice"]))


def _without(left_out: "LeftOut") -> str:
    """Says how many counted prompts cannot be used, and why the first cannot."""
    count = left_out.num_rows
    return f", {count:,} of which cannot be used; the first: {left_out.first}" if count else ""


def decode_media(config: "JobConfig", say: Callable[[str], None]) -> None:
    """Decodes all media of a job, and shows the progress.

    Raises:
        ConfigError: some cannot be used, and the job does not skip such rows.
    """
    import os

    from relax_hpc.config import programs
    from relax_hpc.config.hf_config import ConfigJson
    from relax_hpc.config.run import RunConfig
    from relax_hpc.data.media.recipe import read_recipe
    from relax_hpc.roles.rollout import prompt_check, row_gate

    if not isinstance(config, RunConfig):
        raise ConfigError("--decode: a job with [sft] has no prompts with media; leave it out")
    config = programs.find_models(config)
    ConfigJson(config.model.path)  # refused here if it is not there
    recipe = read_recipe(config.model.path, config.prompts.media)
    if recipe is None:
        raise ConfigError(
            f"--decode: the model in {config.model.path} reads text only; leave it out, or use a "
            "model that takes media"
        )
    files = prompt_check.open_files(config).by_key
    workers = config.prompts.media.advanced.workers or len(os.sched_getaffinity(0))
    with RowsShown() as shown:
        found = row_gate.decode(files, recipe, workers, shown)
    count, first = len(found.refused), [each.reason for each in found.refused[:_MOST_SHOWN]]
    if count:
        rest = [f"and {count - len(first):,} more"] if count > len(first) else []
        said = f"{count:,} of {found.num_media:,} media cannot be used"
        lines = "\n".join([said, *first, *rest])
        if config.prompts.media.advanced.broken == "error":
            raise ConfigError(
                f'{lines}\nreplace them, or set prompts.media.advanced.broken = "skip"'
            )
        say(f"{lines}\ntheir rows are left out")
    else:
        say(f"decoded {found.num_media:,} media: each can be used")


_STYLES = {"given": "dim", "said by the policy": "", "given by the environment": "dim"}
"""Styles of turns, in the order of `schema.TurnKind`."""


def play_episode(config: "JobConfig", replies: Sequence[str], say: Callable[[str], None]) -> None:
    """Plays an episode of a job's first prompt, and prints it on standard error.

    Args:
        replies: the policy's; default is the prompt's answer.
        say: gets the result.

    Raises:
        ConfigError: the environment or the reward fails.
    """
    from rich.console import Console
    from rich.text import Text

    from relax_hpc.config.run import RunConfig
    from relax_hpc.roles.rollout import play, prompt_check
    from relax_hpc.runs.viewer.words import Words

    if not isinstance(config, RunConfig):
        raise ConfigError("--play: a job with [sft] plays no episodes; leave it out")
    source = prompt_check.open_sources(config).train
    played = play.play(config, source, replies)
    console, words = Console(stderr=True, soft_wrap=True), Words(source.tokenizer.decode)
    console.print(Text(printable(f"an episode of {played.prompt.where}:"), style="bold"))
    for row in played.rows:
        _print_row(console, row, words)
    say(_outcome(played))


def _print_row(console: "Console", row: "Trajectory", words: "Words") -> None:
    from rich.text import Text

    from relax_hpc.runs.viewer.words import of_row, within

    if row.segment:
        console.print("a history of its own, so another sequence:", style="yellow")
    turns = [] if row.turns is None else row.turns.tolist()
    media = of_row(row)
    kinds = list(_STYLES)
    for (first, kind), (end, _) in pairwise([*turns, (len(row.token_ids), 0)]):
        tokens = row.token_ids[first:end].tolist()
        trained = ", trained on" * bool(row.loss_mask[first])
        title = f"{kinds[kind]}, {_format_count(len(tokens), 'token', 's')}{trained}"
        console.print(Text(title, style="cyan"))
        text = words.text(tokens, within(media, first, end))
        console.print(Text(text, style=_STYLES[kinds[kind]]))


def _outcome(played: "Played") -> str:
    score, metrics = played.episode.score, played.episode.metrics
    calls = len(played.episode.record.calls)
    reward = f"reward {score.value:g}{_format_numbers(score.parts)}"
    if score.error is not None:
        reward = f"its reward {score.error}"
    told = f"; metrics{_format_numbers(metrics)}" if metrics else ""
    sampled = sum(int(row.loss_mask.sum()) for row in played.rows)
    if not calls:
        told += "; the policy was asked nothing, and such an episode teaches nothing"
    return (
        f"played an episode: {_format_count(calls, 'repl', 'ies', 'y')}, "
        f"{_format_count(sampled, 'token', 's')} trained on; {reward}{told}"
    )


def _format_count(number: int, word: str, many: str, one: str = "") -> str:
    return f"{number:,} {word}{one if number == 1 else many}"


def _format_numbers(numbers: Mapping[str, float]) -> str:
    return " (" + ", ".join(f"{name} {value:g}" for name, value in numbers.items()) + ")"
