"""Shows a run's held-out scores, or scores a model now."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_hpc.cli import completion
from relax_hpc.cli.arguments import AsJson, find_run
from relax_hpc.cli.lines import RowsShown, echo
from relax_hpc.errors import ConfigError, nearest

evaluation = typer.Typer()

_OF_A_MODEL = "Of a model: "


@evaluation.command(
    "eval",
    epilog="Examples:  relax-hpc eval arithmetic --json | jq .[].all.mean  |  relax-hpc eval "
    "models/tiny/model --set heldout=models/tiny/heldout.jsonl --samples 4 --temperature 0.8 "
    "--k 1,4 --key model.dtype=float32",
)
def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            help="A run, or the Hugging Face folder of a model.",
            metavar="WHAT",
            autocompletion=completion.names_of_runs,
        ),
    ],
    sets: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Of a run: only this set. Of a model: NAME=FILE, all of whose prompts are scored; "
            "repeatable.",
            show_default=False,
            autocompletion=completion.names_of_sets,
        ),
    ] = [],  # noqa: B006
    ks: Annotated[
        list[str],
        typer.Option(
            "--k",
            help="k of pass@k, pass^k and maj@k, as in 1,4. 1 and the samples per prompt if not "
            "given.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    right: Annotated[float, typer.Option(help="Score from which on a sample is right.")] = 1.0,
    as_json: AsJson = False,
    job: Annotated[
        Path | None, typer.Option(help=f"{_OF_A_MODEL}a job file for what is not given here.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help=f"{_OF_A_MODEL}responses to each prompt.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help=f"{_OF_A_MODEL}0 is greedy.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"{_OF_A_MODEL}see docs/reference/config.md.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help=f"{_OF_A_MODEL}its name.")] = None,
    keys: Annotated[
        list[str],
        typer.Option(
            "--key",
            help=f"{_OF_A_MODEL}section.key=value of a job; repeatable.",
            show_default=False,
            autocompletion=completion.settings,
        ),
    ] = [],  # noqa: B006
    name: Annotated[
        str | None, typer.Option(help=f"{_OF_A_MODEL}of the run directory that keeps the samples.")
    ] = None,
) -> None:
    """Tell how each policy of a run did on the held-out sets, or score a model on some, alone."""
    from relax_hpc.runs import evaluations

    asked_ks = _numbers(ks)
    asked = {
        "samples_per_prompt": samples, "temperature": temperature, "top_p": top_p,
    }  # fmt: skip
    settings = {key: value for key, value in asked.items() if value is not None}
    run_dir, found = find_run(subject), list[evaluations.Evaluation]()
    if run_dir is not None:
        _refuse(subject, {"job": job, "name": name, "reward": reward, "key": keys, **settings})
        names: Sequence[str | None] = sets or [None]
        for only in names:
            found += evaluations.collect(run_dir, ks=asked_ks, name=only, right=right)
    else:
        more = keys if reward is None else [*keys, f"reward.name={reward}"]
        scored = _score(subject, job, sets, settings, more, name, asked_ks)
        found = evaluations.collect(scored, ks=asked_ks, right=right)
    echo(evaluations.to_json(found) if as_json else evaluations.text(found))


def _score(
    subject: str,
    job: Path | None,
    sets: list[str],
    settings: dict[str, Any],
    keys: list[str],
    name: str | None,
    ks: list[int],
) -> Path:
    from relax_hpc.launch.evaluate import EvaluationRequest, evaluate

    model = Path(subject)
    if not (model / "config.json").is_file():
        close = nearest(subject, completion.names_of_runs(""))
        raise ConfigError(
            f"{subject}: is no run (run.json, there or under runs/) and no model (config.json)"
            + f"; {close}" * bool(close)
        )
    asked = EvaluationRequest(model, job, _files(sets), settings, keys, name)
    with RowsShown() as shown:
        return evaluate(asked, ks, say=lambda line: echo(line, err=True), advance=shown)


def _files(sets: list[str]) -> dict[str, str]:
    from relax_hpc.config.run import RunConfig

    found = dict[str, str]()
    for each in sets:
        name, sep, path = each.partition("=")
        if not (sep and name and path):
            raise ConfigError(f"--set {each}: of a model, name a file too: NAME=FILE")
        if name.partition(".")[0] in RunConfig.model_fields and not Path(path).exists():
            raise ConfigError(
                f"--set {each}: of a model this names a set and its file; a key is --key {each}"
            )
        if name in found:
            raise ConfigError(f"--set {each}: there are two of that name; give each its own")
        found[name] = path
    return found


def _numbers(ks: list[str]) -> list[int]:
    try:
        return [int(k) for each in ks for k in each.split(",")]
    except ValueError:
        raise ConfigError(f"--k {' '.join(ks)}: is no list of numbers; write --k 1,4") from None


def _refuse(subject: str, given: dict[str, Any]) -> None:
    for key, value in given.items():
        if value not in (None, []):
            option = {"samples_per_prompt": "samples"}.get(key, key).replace("_", "-")
            raise ConfigError(
                f"--{option}: {subject} is a run, whose samples are there; leave it out, or name a "
                "model"
            )
