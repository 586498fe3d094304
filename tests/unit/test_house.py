"""What holds of the package as a whole: whom it knows of other libraries, and its size."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "relax_hpc"
SUBMITIT = {"JobEnvironment", "SlurmExecutor"}
"""What we use of submitit; docs/architecture.md says for what."""


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def of_submitit(tree):
    """What a module takes from submitit; a name with a dot is of one of its own modules."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if (
                module.split(".")[0] == "submitit"
            ):
                inner = module.removeprefix("submitit").lstrip(".")
                yield from (f"{inner}.{each.name}".lstrip(".") for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] == "submitit")


def test_of_submitit_only_public_names_are_known_and_only_to_the_launcher():
    found = {(path.parts[0], name) for path, tree in trees() for name in of_submitit(tree)}
    assert found == {("launch", name) for name in SUBMITIT}
    said = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert all(f"`submitit.{name}`" in said for name in SUBMITIT)


def test_it_would_notice_a_private_name_of_submitit():
    assert list(of_submitit(ast.parse("from submitit.core.utils import JobPaths"))) == [
        "core.utils.JobPaths"
    ]
    assert list(of_submitit(ast.parse("import submitit.core"))) == ["submitit.core"]
