"""`run.py`: plants mistakes in copies of the tree, one at a time; says which the tests notice.

The mistakes are in the TOML files beside this one, a file per area:

    [[mutant]]
    name = "what is wrong then"            # unique
    file = "relax_hpc/roles/actor.py"
    old = "text that occurs there once"
    new = "what stands there instead"
    tests = ["tests/unit/test_actor.py"]   # what pytest is given
    survives = "why no test notices it"    # only where none does

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
import time
import tomllib
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENOUGH = 0.9
"""The share of the mistakes that is to be noticed."""
TEST_S, RUN_S = 60, 600
"""How long a test, and those of one mistake, may take: one that does not end is noticed too."""
BEGIN = """#!{python}
import sys
from relax_hpc.cli import main
sys.exit(main())
"""


@dataclasses.dataclass(frozen=True)
class Mutant:
    area: str
    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    survives: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    mutant: Mutant
    noticed_by: str
    """The first test that failed, or what else happened; empty if none did."""
    seconds: float


def load() -> list[Mutant]:
    """All mistakes, area by area."""
    lists = sorted(Path(__file__).parent.glob("*.toml"))
    return [
        Mutant(area=path.stem, **fields)
        for path in lists
        for fields in tomllib.loads(path.read_text())["mutant"]
    ]


class Copy:
    """A copy of the work tree with a Python of its own, to which `relax_hpc` is that copy."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        for file in _files():
            (self._tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self._tree / file)
        self._python = self._environment(folder / "venv")
        asked = "import relax_hpc; print(relax_hpc.__file__)"
        found = subprocess.check_output([self._python, "-I", "-c", asked], cwd=folder, text=True)
        assert Path(found).is_relative_to(self._tree.resolve()), f"tests would import {found}"

    def _environment(self, folder: Path) -> Path:
        """Also children that inherit no variable import the copy, by the path in site-packages."""
        venv.create(folder)
        (packages,) = folder.glob("lib/python*/site-packages")
        added = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "copy.pth").write_text("\n".join([str(self._tree.resolve()), *added, ""]))
        python = folder / "bin" / "python"
        (folder / "bin" / "relax-hpc").write_text(BEGIN.format(python=python))
        (folder / "bin" / "relax-hpc").chmod(0o755)
        return python

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        path = self._tree / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is not there once"
        self._write(path, text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Compiled code is known by its source's size and second: too coarse here."""
        path.write_text(text)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: list[str], *options: str, limit_s: float | None) -> tuple[int, str]:
        """Exit code and output of pytest; what takes too long is ended with its children."""
        pytest = [self._python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
        path = f"{self._python.parent}:{os.environ['PATH']}"
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                [*pytest, "--tb=no", "-o", f"timeout={TEST_S}", *options, *tests],
                cwd=self._tree,
                env={**os.environ, "PYTHONPATH": str(self._tree), "PATH": path},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0)
            return code, out.read()


def _files() -> list[str]:
    """What git has or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [name for name in names if (ROOT / name).is_file()]


def try_out(copies: "queue.SimpleQueue[Copy]", mutant: Mutant) -> Result:
    copy, began = copies.get(), time.monotonic()
    try:
        with copy.planted(mutant):
            code, output = copy.test(mutant.tests, "-x", limit_s=RUN_S)
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
            print(f"  {mutant.file}: {mutant.name}: {mutant.survives or 'NO REASON GIVEN'}")
        elif mutant.survives:
            print(f"  but {mutant.file}: {mutant.name}: was, by {result.noticed_by}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return sum(bool(result.noticed_by) for result in results) / len(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="an area, or a part of a name or file")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at a time")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutants.json")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in load()
        if not options.only
        or any(only == mutant.area or only in mutant.name + mutant.file for only in options.only)
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.area}: {mutant.file}: {mutant.name}")
        return 0
    if not chosen:
        print("no such mutant", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="relax-mutants-") as folder:
        copies = queue.SimpleQueue[Copy]()
        for number in range(options.jobs):
            copies.put(first := Copy(Path(folder) / str(number)))
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        print(f"{len(chosen)} mistakes; first, {len(tests)} tests or files without any", flush=True)
        code, output = first.test(tests, "-n", str(options.jobs), limit_s=None)
        if code:
            print(output, "the tests fail without a mistake", sep="\n", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda mutant: try_out(copies, mutant), chosen))
    return 0 if report(results, options.report) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
