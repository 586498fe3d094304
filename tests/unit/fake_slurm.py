"""Slurm's commands as scripts that play what a test has written down, and a run submitted to it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from job_trees import job_of

from relax_hpc.launch import record, states
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths

_COMMAND = """#!/bin/bash
cd {folder}
echo "${{0##*/}} $*" >> asked
[ ! -e silent ] || {{ sed "s/^squeue/${{0##*/}}/" silent >&2; exit 1; }}
"""
# As Slurm does: unknown jobs are an error only where one is asked for.
_SQUEUE = """
case "$*" in *%o*) cat commands; exit 0 ;; *-j*) ;; *) exit 2 ;; esac
jobs=${@: -1}
for job in ${jobs//,/ }; do grep -E "^$job([+]|[|])" queue && found=1; done
[ -n "$found" ] || [[ $jobs = *,* ]] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
"""  # noqa: E501
# A job of which only a task is left that does not hear TERM may be requeued: `back` says so.
_SCANCEL = """
word=$(head -n1 back 2>/dev/null) && sed -i 1d back
sed -i -E "s/^(${@: -1}([+][0-9]+)?[|])[^|]*/\\1${word:-CANCELLED}/" queue
"""
_SBATCH = """
sleep 0.1
[ ! -e refusal ] || { cat refusal >&2; [ ! -e lost ] || echo "9+0|${@: -1}" > commands; exit 1; }
echo "9+0|PENDING||9" >> queue
cat banner 2>/dev/null
echo 9
"""
DEAD = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_CONF = """squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: fatal: Could not establish a configuration source
"""


@dataclass
class FakeSlurm:
    """A Slurm whose `squeue` repeats a file, and which notes in another what it was asked."""

    folder: Path
    run_dir: Path

    def says(self, *lines: str) -> None:
        """squeue's answer from now on: "7+0|RUNNING", or all fields."""
        (self.folder / "silent").unlink(missing_ok=True)
        full = [line if line.count("|") > 1 else f"{line}|n1|1" for line in lines]
        (self.folder / "queue").write_text("".join(f"{line}\n" for line in full))

    def is_silent(self, words: str = DEAD) -> None:
        (self.folder / "silent").write_text(words)

    def refuses(self, words: str) -> None:
        (self.folder / "refusal").write_text(words)

    def greets(self, words: str) -> None:
        """What sbatch prints above the id of a job."""
        (self.folder / "banner").write_bytes(os.fsencode(words))

    def asked(self, command: str) -> list[str]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if line.split()[0] == command]

    def brings_back(self, *words: str) -> None:
        """What squeue says after each scancel, while a requeue undoes it."""
        (self.folder / "back").write_text("".join(f"{word}\n" for word in words))

    def leaves(self, code: int, job: str = "7") -> None:
        (self.run_dir / "submission" / f"{job}_exit_code").write_text(f"{code}\n")


def make(tmp_path: Path, monkeypatch, earlier=()) -> FakeSlurm:
    """A run of job 7, and of those in `earlier` before; Slurm has forgotten all of them."""
    fake = FakeSlurm(tmp_path / "slurm", tmp_path / "runs" / "run")
    fake.folder.mkdir()
    for name, text in (
        ("squeue", _SQUEUE), ("sbatch", _SBATCH), ("scancel", _SCANCEL), ("sinfo", ""),
        ("scontrol", ""), ("sacct", "exit 1"),
    ):  # fmt: skip
        script = fake.folder / name
        script.write_text(_COMMAND.format(folder=fake.folder) + text)
        script.chmod(0o755)
    for name in ("queue", "asked", "commands"):
        (fake.folder / name).touch()
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    states.has_accounting.cache_clear()
    monkeypatch.setattr("relax_hpc.runs.resume._check_inputs", lambda *_: None)  # there are none
    root, pool = str(fake.run_dir.parent), {"resources": {"max_nodes": 3}}
    config = job_of(run_root=root, schedule__num_steps=30, engines__rollout=pool)
    paths = RunPaths(fake.run_dir)
    write_json(paths.config, config.model_dump(mode="json"))
    before: tuple[LaunchRecord, ...] = ()
    for number, job in enumerate((*earlier, "7"), start=1):
        components = tuple(
            LaunchedComponent(role, f"{job}+{k}", 1, paths.component(role))
            for k, role in enumerate(("rollout", "actor"))
        )
        launched = LaunchRecord(
            "slurm", job, components, time.time(), None, "login1", number, before
        )
        before = (*before, launched)
    for component in launched.components:
        component.folder.mkdir(parents=True)
    record.write(paths, launched, {})
    return fake
