"""Writes the model card of converted weights: README.md, with the curve beside it."""

import json
import re
import shutil
from pathlib import Path

from relax_hpc.config.job_file import read_resolved
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.runs import changes, evaluations
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import FREQUENT, read_events
from relax_hpc.runtime.telemetry.progress import short

_CARD = """\
---
{front}tags: [relax-hpc]
---

# {name}, step {step}

`{base}` after {step} of {num_steps} steps of {kind} with relax-hpc.

* Base model: `{base}`
* Data: {data}
* Licence: {licence}
* Trained on: {tokens} tokens, prompts included

{curve}## Held-out scores, with standard errors

```text
{scores}
```

## Settings that differ from defaults

```toml
{settings}
```
"""
_IN_CACHE = re.compile(r"models--(.+?)--(.+)")
_LICENCE = re.compile(r"^license\w*:.*$", re.MULTILINE)
_FOLDERS = re.compile(r'"/[^"]*/')
_OF_THE_SITE = re.compile(r"run_root|name|(launch|boards|notify)\..+|(.+\.)?resources\..+")


def write(run: RunPaths, step: int, folder: Path) -> None:
    """Writes the card of a run's policy into the folder of its weights.

    Raises:
        ConfigError: not a run directory.
    """
    config = read_resolved(run.config)
    is_rl, path = isinstance(config, RunConfig), config.model.path
    cached = next(filter(None, map(_IN_CACHE.fullmatch, path.parts)), None)
    base, licence = "/".join(cached.groups()) if cached else path.name, _licence(path)
    front = [f"base_model: {json.dumps(base)}"] * bool(cached) + licence
    done = history.steps(read_events(run.events_folder, but=FREQUENT))
    curve = run.reward_curve if is_rl else run.loss_curve
    if curve.exists():
        shutil.copy(curve, folder / curve.name)
    said = _CARD.format(
        front="".join(f"{line}\n" for line in front),
        name=config.name,
        step=step,
        base=base,
        num_steps=config.num_steps,
        kind="reinforcement learning" if is_rl else "supervised fine-tuning",
        data=_data(config),
        licence=", ".join(licence) or "see the base model's licence",
        tokens=short(sum(event["num_tokens"] for event in done if event["step"] <= step)),
        curve=f"![Curve]({curve.name})\n\n" * curve.exists(),
        scores=_scores(run),
        settings="\n".join(_settings(config)),
    )
    (folder / "README.md").write_text(said, encoding="utf-8")


def _licence(model: Path) -> list[str]:
    """Returns the lines about it in the front matter of the base model's card."""
    try:
        head = (model / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return _LICENCE.findall(head.split("\n---", 1)[0]) if head.startswith("---") else []


def _data(config: JobConfig) -> str:
    tree = config.model_dump(mode="json")
    given = [tree["sft"]["train"]] if "sft" in tree else []
    if isinstance(config, RunConfig):
        given = [str(path) for each in config.prompts.mixture.values() for path in each.path]
    return ", ".join(f"`{Path(each).name}`" for each in given)


def _scores(run: RunPaths) -> str:
    try:
        return evaluations.text(evaluations.collect(run.root))
    except ConfigError:
        return "none"


def _settings(config: JobConfig) -> list[str]:
    """Lists keys and values; of files without the folders above, which are nobody's business."""
    told = changes.flat(config.model_dump(mode="json", exclude_defaults=True))
    return [
        f"{key} = " + _FOLDERS.sub('"', json.dumps(value, ensure_ascii=False))
        for key, value in told
        if value is not None and not _OF_THE_SITE.fullmatch(key)
    ]
