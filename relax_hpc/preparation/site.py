"""A profile of this cluster to begin with, of what `sinfo` and `sacctmgr` tell."""

import re
import shutil
import time
from typing import NamedTuple

from relax_hpc.launch.jobs import output_of
from relax_hpc.launch.trial import associations

_NO_LIMIT = ("infinite", "n/a")


class _Row(NamedTuple):
    """Nodes of a partition that are alike."""

    partition: str
    nodes: str
    cpus: str
    gpus: str
    limit: str
    features: str


def profile_text() -> str | None:
    """The text of a profile; None where no Slurm answers."""
    if shutil.which("sinfo") is None:
        return None
    answer = output_of(["sinfo", "-h", "-o", "%P|%D|%c|%G|%l|%f"])
    if answer.returncode or not answer.stdout.strip():
        return None
    rows = [_Row(*line.split("|")) for line in answer.stdout.split("\n") if line.count("|") == 5]
    chosen = _chosen(rows)
    return "\n".join([*_table(rows), *_partition(chosen), *_accounting(), *_rest(chosen)]) + "\n"


def _chosen(rows: list[_Row]) -> _Row:
    """The partition of a job: the default one, unless only others have GPUs."""
    on_gpus = [row for row in rows if row.gpus != "(null)"] or rows
    return next((row for row in on_gpus if row.partition.endswith("*")), on_gpus[0])


def _table(rows: list[_Row]) -> list[str]:
    head = _Row("partition", "nodes", "cores", "GPUs", "time limit", "features")
    cells = [[cell.replace("(null)", "-") for cell in row] for row in [head, *rows]]
    cells = [[*row[:3], re.sub(r"\(.*?\)", "", row[3]), *row[4:]] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    return [
        f"# This cluster as Slurm described it on {time.strftime('%Y-%m-%d')}. Every job of yours",
        "# asks for what stands here, unless the job or --profile says otherwise; keep what fits.",
        "#",
        *(f"#   {line.rstrip()}" for line in lines),
        "",
    ]


def _partition(row: _Row) -> list[str]:
    limit = row.limit if row.limit not in _NO_LIMIT else "1-00:00:00"
    return [
        f'partition = "{row.partition.rstrip("*")}"',
        f'# time = "{limit}"'.ljust(27) + "# else the partition's default",
    ]


def _accounting() -> list[str]:
    lines = []
    for key, names in (("account", associations("Account")), ("qos", associations("QOS"))):
        several = f"# yours: {', '.join(names)}" if len(names) > 1 else ""
        if names and (key == "account" or len(names) > 1):
            mark = "# " if several else ""
            lines.append(f'{mark}{key} = "{names[0]}"'.ljust(27) + several)
    return [line.rstrip() for line in lines]


def _rest(row: _Row) -> list[str]:
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
