"""Commands that come before a job: a job file and profile to start from, models and prompts."""

import json
import os
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from relax_hpc.cli.arguments import Job, Overrides, run_dir_of
from relax_hpc.cli.completion import names_of_jobs
from relax_hpc.cli.lines import echo
from relax_hpc.errors import ConfigError, nearest
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.user_files import write_named
from relax_hpc.runtime.text import align_lines

beginning = typer.Typer()
_WIDTH = 96
_END = """
# What is asked of Slurm for every component; ~/.config/relax-hpc/default.toml, or another profile,
# says the rest. [engines.rollout.resources] and [actor.resources] refine it.
# [resources]
# time = "2-00:00:00"
# gpus_per_node = 4

# All keys: relax-hpc keys. One of them: relax-hpc keys actor.optimizer.lr
"""


def _list(asked: bool) -> None:
    if not asked:
        return
    for name, about in describe_jobs().items():
        echo(f"{name}: {about}")
    raise typer.Exit


@beginning.command(
    epilog="Examples:  relax-hpc init --list  |  relax-hpc init first  |  "
    "relax-hpc init math --like qwen3-4b-gsm8k"
)
def init(
    name: Annotated[str, typer.Argument(help="Name of the job; writes NAME.toml here.")],
    like: Annotated[
        str,
        typer.Option(help="Job that comes along, to begin from.", autocompletion=names_of_jobs),
    ] = "demo",
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="List these jobs, and end."),
    ] = False,
) -> None:
    """Write a job with every key explained and, unless there is one, a profile of this cluster."""
    from relax_hpc.launch import profiles
    from relax_hpc.launch.submit import mode_of
    from relax_hpc.sections import NAME

    if not re.match(NAME, name):
        raise ConfigError(f"{name!r}: is no name of a run; use letters, digits, '.', '_' and '-'")
    job, folder = Path(f"{name}.toml"), profiles.folder()
    if os.path.lexists(job):
        raise ConfigError(f"{job}: is there already; choose another name")
    schema_file, profile = folder / "job.schema.json", folder / "default.toml"
    text = job_text(like, name, schema_file)
    is_new = not profile.exists()
    described = profile_text() if is_new else None
    is_silent = is_new and not described and mode_of(local=False) == "slurm"
    local = " --local" if is_silent else ""  # else submit would ask a Slurm that does not answer
    text = text.replace(f"relax-hpc submit {job}\n", f"relax-hpc submit {job}{local}\n", 1)
    folder.mkdir(parents=True, exist_ok=True)
    _write(schema_file, json.dumps(job_schema()), replace=True)
    _write(job, text)
    echo(f"{job}: a job like {like}; relax-hpc init --list names the others")
    if not is_new:
        echo(f"{profile}: your profile, left as it is")
    elif described:
        _write(profile, described)
        profiles.load(str(profile))
        echo(f"{profile}: what every job asks of this cluster; look through it")
    else:
        echo("no Slurm answers here: no profile is made, jobs run on this machine")
    for command in re.findall("`(relax-hpc make-tiny .+?)`", text):
        echo(f"next: {command}")
    echo(f"next: relax-hpc check {job}{local}")


@beginning.command(epilog="Example:  relax-hpc schema --out job.schema.json")
def schema(
    out: Annotated[Path | None, typer.Option(help="File; printed if not given.")] = None,
) -> None:
    """JSON Schema of a job, for editors: a job names it in a line `#:schema FILE`."""
    text = json.dumps(job_schema(), indent=1)
    if out is None:
        echo(text)
    else:
        _write(out, text, "--out", replace=True)


def _write(path: Path, text: str, key: str = "file", *, replace: bool = False) -> None:
    with write_named(path, key, replace=replace) as file:
        file.write(text.encode())


def describe_jobs() -> dict[str, str]:
    """Describes each job by the first line of its comment."""
    from relax_hpc.config import job_file

    texts = {name: path.read_text(encoding="utf-8") for name, path in job_file.list_jobs().items()}
    return {name: re.findall("^# (.+)", text, re.M)[0] for name, text in texts.items()}


def job_text(like: str, name: str, schema: Path) -> str:
    """Returns a job like an included one.

    Args:
        like: the included one's name.
        name: of the run, and of the file without its suffix.
        schema: file with which editors check the job.

    Raises:
        ConfigError: there is no such job.
    """
    from relax_hpc.config import job_file

    known = job_file.list_jobs()
    if like not in known:
        hint = nearest(like, known) or f"use one of {', '.join(known)}"
        raise ConfigError(f"--like {like}: no such job; {hint}")
    lines = known[like].read_text(encoding="utf-8").splitlines()
    about = [line for line in lines if re.match(r"#   (shows|needs|expect| )", line)]
    at = next(number for number, line in enumerate(lines) if line.startswith("name ="))
    head = [
        f"#:schema file://{schema}",
        f"# {name}: begun from the job `{like}` that comes with relax-hpc.",
        "#",
        f"#   run       relax-hpc submit {name}.toml",
        f"# `{like}`, unchanged:",
        *about,
        "",
        f"name = {json.dumps(name)}",
    ]
    return "\n".join([*head, *_explain(lines[at + 1 :])]) + "\n" + _END


def _explain(lines: list[str]) -> Iterator[str]:
    """Puts a key's text above every line that sets one."""
    from relax_hpc.config.keys import keys_of
    from relax_hpc.config.run import RunConfig, SftRunConfig

    keys = {key.name: key.text for kind in (SftRunConfig, RunConfig) for key in keys_of(kind)}
    section = ""
    for line in lines:
        if table := re.match(r"\[(.*)\]", line):
            section = f"{table[1]}."
        elif (key := re.match(r"([\w.]+) *=", line)) and (text := _text_of(section + key[1], keys)):
            wrapped = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
            yield from (f"# {part}" for part in wrapped)
        yield line


def _text_of(key: str, keys: dict[str, str]) -> str:
    first, *rest = key.split(".")
    of_any_name = ".".join([first, "<name>", *rest[1:]])
    component = re.fullmatch(r"(.*\.)?resources\.(\w+)", key)
    told_once = f"<component>.resources.{component[2]}" if component else ""
    return keys.get(key) or keys.get(of_any_name) or keys.get(told_once, "")


def job_schema() -> dict[str, Any]:
    from pydantic.json_schema import models_json_schema

    from relax_hpc.config.keys import add_texts
    from relax_hpc.config.run import RunConfig, SftRunConfig

    kinds = (RunConfig, SftRunConfig)
    refs, made = models_json_schema([(kind, "validation") for kind in kinds])
    for kind in kinds:
        add_texts(made, kind)
    learning, tuning = (refs[kind, "validation"] for kind in kinds)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of relax-hpc",
        "if": {"required": ["sft"]},
        "then": tuning,
        "else": learning,
        **made,
    }


_NO_LIMIT = ("infinite", "n/a")


class _NodeKind(NamedTuple):
    """Similar nodes of a partition."""

    partition: str
    nodes: str
    cpus: str
    gpus: str
    limit: str
    features: str


def profile_text() -> str | None:
    """Returns the text of a profile; None without Slurm."""
    from relax_hpc.launch.states import output_of

    if shutil.which("sinfo") is None:
        return None
    answer = output_of(["sinfo", "-h", "-o", "%P|%D|%c|%G|%l|%f"])
    if answer.returncode or not answer.stdout.strip():
        return None
    rows = [
        _NodeKind(*line.split("|")) for line in answer.stdout.split("\n") if line.count("|") == 5
    ]
    chosen = _chosen(rows)
    return "\n".join([*_table(rows), *_partition(chosen), *_accounting(), *_rest(chosen)]) + "\n"


def _chosen(rows: list[_NodeKind]) -> _NodeKind:
    """Chooses the default partition, unless only others have GPUs."""
    on_gpus = [row for row in rows if row.gpus != "(null)"] or rows
    return next((row for row in on_gpus if row.partition.endswith("*")), on_gpus[0])


def _table(rows: list[_NodeKind]) -> list[str]:
    head = _NodeKind("partition", "nodes", "cores", "GPUs", "time limit", "features")
    cells = [[cell.replace("(null)", "-") for cell in row] for row in [head, *rows]]
    cells = [[*row[:3], re.sub(r"\(.*?\)", "", row[3]), *row[4:]] for row in cells]
    return [
        f"# This cluster as Slurm described it on {time.strftime('%Y-%m-%d')}. Every job of yours",
        "# asks for what stands here, unless the job or --profile says otherwise; keep what fits.",
        "#",
        *(f"#   {line}" for line in align_lines(cells, left=len(head))),
        "",
    ]


def _partition(row: _NodeKind) -> list[str]:
    limit = row.limit if row.limit not in _NO_LIMIT else "1-00:00:00"
    return [
        f'partition = "{row.partition.rstrip("*")}"',
        f'# time = "{limit}"'.ljust(27) + "# else the partition's default",
    ]


def _accounting() -> list[str]:
    from relax_hpc.launch.cluster import associations

    lines = []
    for key, names in (("account", associations("Account")), ("qos", associations("QOS"))):
        several = f"# yours: {', '.join(names)}" if len(names) > 1 else ""
        if names and (key == "account" or len(names) > 1):
            mark = "# " if several else ""
            lines.append(f'{mark}{key} = "{names[0]}"'.ljust(27) + several)
    return [line.rstrip() for line in lines]


def _rest(row: _NodeKind) -> list[str]:
    from relax_hpc.launch.states import output_of

    features = "" if row.features == "(null)" else row.features
    count = re.search(r"gpu(?::[^,:]+)?:(\d+)", row.gpus)
    lines = [f'# constraint = "{features.split(",")[0]}"'] if features else []
    plugins = output_of(["srun", "--mpi=list"])
    if "pmix" in plugins.stdout + plugins.stderr:
        lines.append('# mpi = "pmix"'.ljust(27) + "# if mpi4py is built against this Open MPI")
    lines.append('# setup = ["module load cuda/12.8"]')
    if count:
        for table in ("rollout", "actor"):
            lines += ["", f"# [{table}]", f"# gpus_per_node = {count[1]}"]
    return lines


models = typer.Typer()


@models.command(
    "make-tiny",
    epilog="Examples:  relax-hpc make-tiny models/tiny --digits 2  |  "
    "relax-hpc make-tiny models/tiny-vl --kind vl",
)
def make_tiny(
    folder: Annotated[Path, typer.Argument(help="Gets model/ and the prompts.")],
    kind: Annotated[
        Literal["text", "code", "vl", "vl-moe", "omni"],
        typer.Option(
            help="text: a Qwen3 and sums; code: a Qwen3 and one-line programs; vl: a Qwen3-VL and "
            "images, the colour of whose shape is asked for; vl-moe: the same with experts; omni: "
            "a Qwen3-Omni and images, and sounds, whose pitch is asked for."
        ),
    ] = "text",
    digits: Annotated[int, typer.Option(help="Digits of each summand.", min=1, max=6)] = 2,
    seed: int = 0,
    target: Annotated[
        float, typer.Option(help="Held-out accuracy of sums or programs to start RL from.")
    ] = 0.45,
) -> None:
    """Make a tiny policy and a task to try everything with: offline, in a minute."""
    import torch

    from relax_hpc.cli.demo.make_tiny import make, make_seeing

    torch.set_num_threads(1)  # the model is too small to share out
    folder.mkdir(parents=True, exist_ok=True)
    with permissions.hold_folder(folder) as there:
        if kind == "text" or kind == "code":
            made = make(there, kind=kind, digits=digits, seed=seed, target=target, progress=echo)
        else:
            made = make_seeing(there, kind=kind, seed=seed, progress=echo)
    echo(f"{folder}: {made}")


@models.command(
    epilog="Examples:  relax-hpc convert arithmetic --to hf --step 40  |  "
    "relax-hpc convert models/qwen3 --to megatron --out weights/qwen3  |  "
    "relax-hpc convert adapted --to peft --out adapters/adapted  |  "
    "relax-hpc convert smollm2.gguf --out models/smollm2"
)
def convert(
    what: Annotated[
        str, typer.Argument(help="A run, a checkpoint, a Hugging Face folder, or a GGUF file.")
    ],
    to: Annotated[str, typer.Option(help="hf, megatron, or peft: adapters.")] = "hf",
    out: Annotated[Path | None, typer.Option(help="Is made; by default in the run, hf/.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of a run; default is the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The step with the best score, see keep_best.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Lends config.json and tokenizer; the run's by default.")
    ] = None,
) -> None:
    """Convert weights between checkpoints and Hugging Face folders, a tensor at a time, no GPU.

    Weights of a run come with a model card, README.md.
    """
    from relax_hpc.runtime import devices
    from relax_hpc.trainer.megatron import cpu

    devices.hush()
    cpu.install()
    from relax_hpc.runs import card
    from relax_hpc.trainer.checkpoints import convert as conversion
    from relax_hpc.trainer.checkpoints import gguf_file

    folder = Path(what)
    if folder.suffix == ".gguf":
        echo(gguf_file.convert(folder, to, out))
        return
    if not folder.exists():
        folder = run_dir_of(what)
    echo(
        conversion.convert(folder, to, out=out, step=step, model=model, best=best, card=card.write)
    )


@models.command(epilog="Example:  relax-hpc fetch first.toml --set model.path=Qwen/Qwen3-4B")
def fetch(
    job: Job,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Bring the models and data that a job names on the Hugging Face hub into its cache here."""
    from relax_hpc.cli import fetch as fetching
    from relax_hpc.config import job_file

    fetching.fetch(job_file.load(job, overrides), echo)


@models.command(epilog="Example:  relax-hpc prepare gsm8k --from downloads/gsm8k --out data/gsm8k")
def prepare(
    name: Annotated[
        str,
        typer.Argument(help="gsm8k, dapo-math, deepcoder, openr1mm, geometry3k, avqa or nextqa."),
    ],
    source: Annotated[
        str, typer.Option("--from", help="File or folder that was downloaded; hf: the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder; gets train.jsonl and heldout.jsonl.")],
    heldout: Annotated[
        int, typer.Option(min=1, help="Prompts held out where there is no test part.")
    ] = 500,
) -> None:
    """Make prompts of a public data set: the same ones from the same files."""
    from relax_hpc.cli import prepare as preparation

    made = preparation.prepare(name, source, out, heldout=heldout)
    echo(
        f"{out}: {made.train} prompts to train on, {made.heldout} held out; "
        f"{made.repeated} that came before were left out"
    )
