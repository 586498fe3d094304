"""Makes pages of docs/reference of what the code declares: `make docs`."""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from relax_hpc.cli.keys import all_keys
from relax_hpc.cli.main import app
from relax_hpc.config.keys import Key
from relax_hpc.launch.profiles import PROFILES
from relax_hpc.runtime.paths import ComponentPaths, RunPaths
from relax_hpc.runtime.telemetry.event_table import EVENTS
from relax_hpc.schema import COLUMNS, Column

_MADE = "<!-- made by `make docs` of what the code declares; do not edit -->\n"
_COMMANDS = (
    "# Commands\n\n"
    "`relax-hpc -h` lists them, `relax-hpc COMMAND -h` has what stands here. RUN is the name of a "
    "run, from any folder, or its directory: `relax-hpc ls` shows yours. A shell completes names, "
    "keys and values after `relax-hpc --install-completion`.\n"
)


def commands_page() -> str:
    return "\n".join(
        [
            _MADE + _COMMANDS,
            *(_section(name, each) for name, each in _commands(typer.main.get_command(app), "")),
        ]
    )


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yields every command of a group, including subgroups, with its full name."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from _commands(each, f"{path}{name} ")
        else:
            yield f"{path}{name}", each


def _section(name: str, command: Any) -> str:  # noqa: ANN401
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([f"relax-hpc {name}", *(_argument(each) for each in arguments)])
    lines = [f"## {name}", "", f"`{usage}`: {_plain(command.help)}", ""]
    rows = [(_argument(each), each.help) for each in arguments]
    rows += [(", ".join([*each.opts, *each.secondary_opts]), each.help) for each in options]
    if rows:
        cells = (
            f"| `{left}` | {_plain(right).replace('|', chr(92) + '|')} |" for left, right in rows
        )
        lines += ["| | |", "|---|---|", *cells, ""]
    _, _, examples = (command.epilog or "").partition(":  ")
    lines += ["```", *(each.strip() for each in re.split(r"  \|  ", examples)), "```", ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:  # noqa: ANN401
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def config_page() -> str:
    sections: dict[str, list[Key]] = {}
    for key in all_keys():
        section, _, _ = key.name.rpartition(".")
        sections.setdefault(section, []).append(key)
    tables = [
        f"## {f'`[{section}]`' if section else 'Top level'}\n\n"
        + _table(
            ("key", "type", "default", ""),
            ((f"`{k.name.rpartition('.')[2]}`", k.type, _code(k.default), k.text) for k in found),
        )
        for section, found in sections.items()
    ]
    head = (
        "# Keys of a job\n\nA job is a TOML file; `--set section.key=value` overrides a key. "
        "`relax-hpc keys actor.optimizer` prints a part of this page, `relax-hpc check JOB "
        "--explain KEY` one key with its value in a job. An empty default: leaving the key out "
        "has a meaning of its own.\n"
    )
    return "\n".join([_MADE + head, *tables])


def events_page() -> str:
    rows = (
        (
            kind.by,
            f"`{name}`",
            kind.meaning,
            "; ".join(_field(*each) for each in kind.fields.items()),
        )
        for name, kind in EVENTS.items()
    )
    head = (
        "# Events\n\nOne JSON object per line in `events/<component>-<rank>.jsonl`, with `time` "
        "(seconds since 1970), `role`, `rank`, `pid`, `event`, and the fields below; `time/...` "
        "stands for all names that begin so. JSON knows no number that is not finite: such a field "
        'is null, and `not_finite` says what it was, e.g. `"loss": null, "not_finite": {"loss": '
        '"NaN"}`. Of a trainer or scorer rank 0 writes all but `start`, `world`, `error` and '
        "`resume`, which every rank writes.\n"
    )
    table = _table(("by", "event", "when", "fields"), rows)
    curves = (
        "## Curves\n\nTags of the numbers that [boards](../how-to/boards.md) show, over the steps. "
        "Of an evaluation the step is that of the policy. What engines and producers say between "
        "two steps is one point.\n"
    )
    return "\n".join([_MADE + head, table, curves, _table(("tag", "event", "field"), _tags())])


def _tags() -> Iterator[tuple[str, str, str]]:
    tags = [(tag, name, field) for name, kind in EVENTS.items() for field, tag in kind.tags.items()]
    yield from ((f"`{tag}`", f"`{name}`", f"`{field}`") for tag, name, field in sorted(tags))


def columns_page() -> str:
    rows = (
        (
            f"`{name}`",
            _shape(column),
            column.axis,
            column.writer,
            column.meaning + ("" if column.required else " (optional)"),
        )
        for name, column in COLUMNS.items()
    )
    head = "# Columns of a shard\n\nWho writes what; [bus.md](bus.md) has the bytes.\n"
    return "\n".join([_MADE + head, _table(("column", "type", "per", "writer", ""), rows)])


def run_directory_page() -> str:
    run = RunPaths(Path())
    tasks = ComponentPaths(run.component(_Named("component")), _Named("job"))
    found = _OF_OTHERS | _paths(run) | _paths(tasks)
    folders = {f"{parent}" for path in found for parent in Path(path).parents}
    rows = [(f"`{path}`", text) for path, text in sorted(found.items()) if path not in folders]
    control = [row for row in rows if row[0].startswith("`control/")]
    head = (
        "# The run directory\n\n`submit` makes `runs/NAME/` for one run, on a [file "
        "system](file-systems.md) that every node sees. This page says what each file in it is "
        "for. Every file has one writer, and published files never change. A name with a leading "
        "dot is a draft. [Events](events.md), [checkpoints](../how-to/checkpoints.md) and "
        "[announced ends](failures.md#announced-ends) have pages of their own.\n\n"
        "A member is an engine: `rollout-<task>`, `rollout-<task>.<k>` where a task has several, "
        "`extra-<n>` if it was [added](../how-to/operate.md#add-and-remove-engines), `<pool>-<n>` "
        "in another pool. An attempt is a job id and its number of requeues.\n\n"
        "The run deletes old shards, checkpoints and snapshots. The rest grows by about 26 MB "
        "per 1,000 steps of 64 prompt groups with 8 rollout tasks, and by 0.2 kB and the text for "
        "each held-out sample.\n"
    )
    between = "## Control\n\nRecords by which the parts of a run find each other and agree.\n"
    others = [row for row in rows if row not in control]
    return "\n".join(
        [_MADE + head, _table(("path", ""), others), between, _table(("path", ""), control)]
    )


_OF_OTHERS = {
    "bus": "Trajectories and the plan: [bus.md](bus.md).",
    "submission/<job>_batch.log": "Starts and restarts of components, by the job's script.",
    "submission/<job>_exit_code": "The script's last act.",
    "submission/<job>_submission.sh": "The script.",
}
"""Paths in a run directory outside `RunPaths` -> their content."""


class _Named(str):
    """A path's placeholder with this name, however it is formatted."""

    def __new__(cls, name: str) -> "_Named":
        return super().__new__(cls, f"<{name}>")

    def __format__(self, spec: str) -> str:
        return str(self)


def _paths(paths: RunPaths | ComponentPaths) -> dict[str, str]:
    found = {}
    [declared] = ast.parse(inspect.getsource(type(paths))).body
    assert isinstance(declared, ast.ClassDef)
    for member, after in itertools.pairwise([*declared.body, ast.Pass()]):
        match member, after:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                path = getattr(paths, name)
            case ast.FunctionDef(name=name), _ if text := ast.get_docstring(member):
                path = getattr(paths, name)
                if inspect.ismethod(path):
                    path = path(*map(_Named, inspect.signature(path).parameters))
            case _:
                continue
        path = path.root if isinstance(path, RunPaths) else path
        if isinstance(path, Path):
            found[f"{path}"] = " ".join(text.split())
    return found


_SITES = """\
# Sites

Profiles of public machines, made of what their sites publish. **None was tried.** Name one by
`launch.profile = "alps"`, or copy it to `~/.config/relax-hpc/alps.toml` and add your account and
`python`. `relax-hpc check` then asks the cluster whether partition, limits and plug-ins are so.

* **aarch64** (GH200): every package that pyproject.toml names has a wheel for Python 3.12, those of
  all extras included. glibc 2.28 is enough; SGLang 0.5.17 to 0.5.23 needs 2.34, as on x86-64. pip
  brings torch for CUDA 13 there, too; torch's own indexes were not looked at. On an older system
  use an image. No such machine was tried. Under an emulator (Python 3.11, pages of 4 KB) tests of
  shards, sidecars, records of files and ranks' messages passed: 78.
* **Login nodes** have another processor than GPU nodes at some sites: [submit from one of
  those](../how-to/install.md#login-node).
* **Cray** (`srun --mpi=cray_shasta`): leave `mpi` out. Ranks then meet through the run directory,
  and engines join by MPICH's own launcher; neither needs a plug-in. `check` says what Cray's MPI
  among ranks takes.
* **Slingshot** gives each step a network (VNI) of its own, and trainer and engines are several
  steps. With `--network=job_vni,single_node_vni` tasks take the job's; `check` says if it is
  missing. On Frontier a second step with it does not start on a node: engines of a node must be
  one step, and cannot share the actor's GPUs.
* **AMD** (ROCm): nothing was tried. Install torch from its ROCm index first. Trainer and embedded
  engine use only torch, with its own attention, and Triton. `kind = "sglang"`,
  `attention = "cudnn"` and GPUs with `--local` are refused by name. Images need ROCm inside.

## Networks

What NCCL or RCCL is told, in `setup`. `NCCL_DEBUG=INFO` shows which network it took. The profile's
`network`, or `NCCL_SOCKET_IFNAME`, names the interface of first contact.

"""
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_NETWORKS = (
    (
        "InfiniBand",
        "nothing; `NCCL_IB_HCA=mlx5` chooses adapters by their names' beginnings",
        f"[NVIDIA]({_NCCL})",
    ),
    (
        "RoCE",
        "the same; NCCL finds the GID itself, or `NCCL_IB_GID_INDEX` names one of `show_gids`, and "
        "`NCCL_IB_TC` the site's traffic class",
        f"[NVIDIA]({_NCCL})",
    ),
    (
        "Slingshot",
        'the plug-in aws-ofi-nccl (aws-ofi-rccl) in `LD_LIBRARY_PATH`; `NCCL_NET="AWS Libfabric"`, '
        "so that its absence is an error, `NCCL_CROSS_NIC=1`, `NCCL_NET_GDR_LEVEL=PHB`, "
        "`FI_CXI_DEFAULT_CQ_SIZE=131072`, and against hangs `FI_CXI_DISABLE_HOST_REGISTER=1`, "
        "`FI_MR_CACHE_MONITOR=userfaultfd`; the VNI above",
        "[CSCS](https://docs.cscs.ch/software/communication/nccl/), "
        "[Bristol](https://docs.isambard.ac.uk/user-documentation/guides/nccl/), VNI: "
        "[Mochi](https://github.com/mochi-hpc/mochi-doc/blob/main/docs/source/margo/14_cxi.rst), "
        "[DDStore](https://github.com/ORNL/DDStore)",
    ),
    (
        "EFA",
        "the plug-in aws-ofi-nccl; `FI_EFA_USE_HUGE_PAGE=0`, since tasks fork, and "
        "`NCCL_SOCKET_IFNAME=en`; `FI_PROVIDER=efa` up to aws-ofi-nccl 1.5 only",
        "[AWS](https://github.com/aws-samples/awsome-distributed-training/blob/main/"
        "1.architectures/efa-cheatsheet.md)",
    ),
)
"""Network -> what to set, and who says so."""


def sites() -> dict[str, str]:
    """Returns the text of each profile that names its sources."""
    files = sorted(PROFILES.glob("*.toml"))
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    return {name: text for name, text in texts.items() if _SOURCE.search(text)}


_SOURCE = re.compile(r"^#   https://\S+", re.MULTILINE)


def sites_page() -> str:
    parts = [f"## {name}\n\n```toml\n{text}```\n" for name, text in sites().items()]
    table = _table(("network", "set", "source"), _NETWORKS)
    return "\n".join([_MADE + _SITES + table, *parts])


def _field(name: str, meaning: str) -> str:
    return f"`{name}` {meaning}".rstrip()


def _code(text: str) -> str:
    return f"`{text}`" if text and text != "required" else text


def _shape(column: Column) -> str:
    if column.width is None:
        return column.dtype
    return f"{column.dtype} [{'K' if column.width < 0 else column.width}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


PAGES = {
    "cli.md": commands_page,
    "config.md": config_page,
    "events.md": events_page,
    "columns.md": columns_page,
    "run-directory.md": run_directory_page,
    "sites.md": sites_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
