"""Nothing of ours unpickles what somebody else may have written."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "relax_hpc"
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
"""Calls of torch that unpickle what comes; its groups ask nobody who he is."""
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
WORDS = (*OBJECT_COLLECTIVES, *PICKLES, "torch", "allow_pickle")
"""A module without any of them need not be parsed."""
READERS = {"load", "loads", "Unpickler", "open"}
ALLOWED = {
    ("runtime/comm/world.py", "pickle.loads"): "behind a MAC, or of MPI, which Slurm makes",
    ("inference/embedded/server.py", "pickle.Unpickler"): "makes one class, or raises",
    ("trainer/megatron/checkpoint_files.py", "pickle.Unpickler"): "makes listed classes, or raises",
}


def unpickling(source):
    """Finds what in a module may unpickle, by its usual name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) if (
                name in OBJECT_COLLECTIVES
            ):
                yield name
            case ast.Attribute(ast.Name(module), name) if module in PICKLES and name in READERS:
                yield f"{module}.{name}"
            case ast.ImportFrom(module=module, names=names) if module in PICKLES:
                yield from (f"{module}.{each.name}" for each in names if each.name in READERS)
            case ast.Import(names=names):
                yield from (
                    f"{each.name} as" for each in names if each.name in PICKLES and each.asname
                )
            case ast.Call(ast.Attribute(ast.Name("torch"), "load"), keywords=keywords):
                if ("weights_only", True) not in {
                    (each.arg, getattr(each.value, "value", None)) for each in keywords
                }:
                    yield "torch.load"
            case ast.keyword("allow_pickle", ast.Constant(True)):
                yield "allow_pickle"


def test_only_these_places_unpickle_and_each_knows_what():
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in PACKAGE.rglob("*.py")
        if any(word in (source := path.read_text()) for word in WORDS)
        for what in unpickling(source)
    }
    assert found == set(ALLOWED)
    for path, what in ALLOWED:
        if what == "pickle.Unpickler":
            assert "def find_class(" in (PACKAGE / path).read_text()
