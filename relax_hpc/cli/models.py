"""Commands that make models and prompts."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from relax_hpc.cli.arguments import run_dir_of
from relax_hpc.cli.lines import echo
from relax_hpc.runtime.files import permissions

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
    "relax-hpc convert adapted --to peft --out adapters/adapted"
)
def convert(
    what: Annotated[str, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.")],
    to: Annotated[str, typer.Option(help="hf, megatron, or peft: adapters.")],
    out: Annotated[Path | None, typer.Option(help="Is made; by default in the run, hf/.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of a run; default is the newest.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Lends config.json and tokenizer; the run's by default.")
    ] = None,
) -> None:
    """Convert weights between checkpoints and Hugging Face folders, a tensor at a time, no GPU."""
    from relax_hpc.runtime import devices
    from relax_hpc.trainer.megatron import cpu

    devices.hush()
    cpu.install()
    from relax_hpc.trainer.checkpoints import convert as conversion

    folder = Path(what)
    if not folder.exists():
        folder = run_dir_of(what)
    echo(conversion.convert(folder, to, out=out, step=step, model=model))


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
