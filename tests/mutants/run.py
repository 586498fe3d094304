"""`run.py`: plants mistakes in copies of the tree, one at a time; says which the tests notice.

The mistakes are in the TOML files beside this one, a file per area; `planting.py` says in which
format.

Exit code: 0; 1 if too few were noticed; 2 if the tests fail without a mistake, or none was chosen.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planting import Mutant, Tree, load

ROOT = Path(__file__).parents[2]
ENOUGH = 0.9
"""The fraction of the mistakes that is to be noticed."""
TEST_S, RUN_S = 60, 600
"""How long a test, and those of one mistake, may take: one that does not end is noticed too."""
COMMAND = """#!{python}
import sys
from relax_hpc.cli.main import main
sys.exit(main())
"""

FORKS = """
import json, os, sys
# Nothing of ours; with all that tests import of others a mistake takes a third of the time.
import aiohttp, h5py, httpx, hypothesis, matplotlib, megatron.core.models.gpt, pyarrow, pydantic
import pytest, rich.console, safetensors.torch, starlette.applications, submitit, torch.distributed
import transformers, typer.testing, uvicorn, xdist.plugin
for line in sys.stdin:
    out, *tests = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.setsid()
    for stream, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(out if stream else os.devnull, flags | os.O_APPEND), stream)
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o", sys.argv[1]]
    code = pytest.main([*options, *tests])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them are long
        code = pytest.main([*options, "-m", "not soak", *tests])
    sys.stdout.flush()
    os._exit(code)
"""
"""Runs pytest in a fork per line that it reads; tells the child's id, then its exit code."""


@dataclasses.dataclass(frozen=True)
class Result:
    mutant: Mutant
    noticed_by: str
    """The first test that failed, or what else happened; empty if none did."""
    seconds: float


class Copy:
    """A copy of the work tree with a Python of its own, to which `relax_hpc` is that copy."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        for file in _files():
            (self._tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self._tree / file, follow_symlinks=False)
        self._source = Tree(self._tree)
        self._python = self._environment(folder / "venv")
        asked = "import relax_hpc; print(relax_hpc.__file__)"
        found = subprocess.check_output([self._python, "-I", "-c", asked], cwd=folder, text=True)
        assert Path(found).is_relative_to(self._tree.resolve()), f"tests would import {found}"
        # MPI's launchers lie beside the interpreter that this one was made by.
        path = f"{self._python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._forks = subprocess.Popen(
            [self._python, "-c", FORKS, f"timeout={TEST_S}"],
            cwd=self._tree,
            env={**os.environ, "PYTHONPATH": str(self._tree), "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _environment(self, folder: Path) -> Path:
        """Also children that inherit no variable import the copy, by the path in site-packages."""
        venv.create(folder)
        (packages,) = folder.glob("lib/python*/site-packages")
        added = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "copy.pth").write_text("\n".join([str(self._tree.resolve()), *added, ""]))
        python = folder / "bin" / "python"
        (folder / "bin" / "relax-hpc").write_text(COMMAND.format(python=python))
        (folder / "bin" / "relax-hpc").chmod(0o755)
        return python

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        planting = self._source.planting(mutant)
        text = planting.path.read_text(encoding="utf-8")
        self._write(planting.path, planting.text)
        try:
            yield
        finally:
            self._write(planting.path, text)

    def _write(self, path: Path, text: str) -> None:
        """Compiled code is known by its source's size and second: too coarse here."""
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of pytest; what takes too long is ended with its children."""
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
            print(json.dumps([out.name, *tests]), file=self._forks.stdin, flush=True)
            child = int(self._forks.stdout.readline())
            late = threading.Timer(RUN_S, _end, [child])
            late.start()
            code = int(self._forks.stdout.readline())
            late.cancel()
            _end(child)
            return code, out.read()

    def close(self) -> None:
        self._forks.stdin.close()
        self._forks.wait()


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _files() -> list[str]:
    """Lists the files that git has or would take, links to folders among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [name for name in names if (path := ROOT / name).is_file() or path.is_symlink()]


def without(copies: "queue.SimpleQueue[Copy]", tests: tuple[str, ...]) -> bool:
    """Whether the tests pass as the tree is."""
    copy = copies.get()
    code, output = copy.test(tests)
    copies.put(copy)
    if code:
        print(*tests, output, "fail without a mistake", sep="\n", file=sys.stderr)
    return code == 0


def try_out(copies: "queue.SimpleQueue[Copy]", mutant: Mutant) -> Result:
    copy, began = copies.get(), time.monotonic()
    try:
        with copy.planted(mutant):
            code, output = copy.test(mutant.tests)
    finally:
        copies.put(copy)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    reason = failed[0].split(" - ")[0].partition(" ")[2] if failed else f"exit code {code}"
    result = Result(mutant, reason if code else "", time.monotonic() - began)
    said = result.noticed_by or "NOT NOTICED"
    print(f"{mutant.area}: {mutant.name}: {said} ({result.seconds:.0f} s)", flush=True)
    return result


def report(results: list[Result], path: Path) -> float:
    """Prints a table and who was not noticed, writes both; returns the share of the noticed."""
    areas: dict[str, list[Result]] = {}
    for result in results:
        areas.setdefault(result.mutant.area, []).append(result)
    print("\n| area | noticed |\n|---|---|")
    for area, some in [*areas.items(), ("all", results)]:
        noticed = sum(bool(result.noticed_by) for result in some)
        print(f"| {area} | {noticed}/{len(some)} ({noticed / len(some):.0%}) |")
    print("\nNot noticed:")
    for result in results:
        mutant = result.mutant
        if not result.noticed_by:
            print(f"  {mutant.where}: {mutant.name}: {mutant.survives or 'NO REASON GIVEN'}")
        elif mutant.survives:
            print(f"  but {mutant.where}: {mutant.name}: was, by {result.noticed_by}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps([dataclasses.asdict(result) for result in results], indent=1), encoding="utf-8"
    )
    return sum(bool(result.noticed_by) for result in results) / len(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="an area, or a part of a name or place")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at a time")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutants.json")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in load()
        if not options.only
        or any(
            only == mutant.area or only in f"{mutant.where}: {mutant.name}" for only in options.only
        )
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.area}: {mutant.where}: {mutant.name}")
        return 0
    if not chosen:
        print("no such mutant", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="relax-mutants-") as folder:
        Path(folder).chmod(0o711)  # tests/security runs its copies as other users, too
        made = [Copy(Path(folder) / str(number)) for number in range(options.jobs)]
        copies = queue.SimpleQueue[Copy]()
        for copy in made:
            copies.put(copy)
        tests = sorted({tuple(mutant.tests) for mutant in chosen})
        print(f"{len(chosen)} mistakes; first, {len(tests)} sets of tests without any", flush=True)
        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                if not all(list(pool.map(lambda some: without(copies, some), tests))):
                    return 2
                results = list(pool.map(lambda mutant: try_out(copies, mutant), chosen))
        finally:
            for copy in made:
                copy.close()
    return 0 if report(results, options.report) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
