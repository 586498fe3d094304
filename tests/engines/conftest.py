"""Engines that the contract runs against: the embedded one, and SGLang on CPU where it is built.

`tests/sglang_cpu/setup.sh VENV` builds it; RELAX_SGLANG_PYTHON=VENV/bin/python turns it on.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_fixtures import Served, save_checkpoint, started
from rank_pool import Pools
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.inference import capabilities

KINDS = ("embedded", "sglang")


def pytest_report_header():
    return f"sglang: {SGLANG_PYTHON or 'deselected, RELAX_SGLANG_PYTHON names no interpreter'}"


def pytest_generate_tests(metafunc):
    if "served" in metafunc.fixturenames:
        metafunc.parametrize("served", KINDS, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "sglang" in getattr(item, "callspec", SimpleNamespace(params={})).params.values():
            item.add_marker("sglang")
    deselected = [item for item in items if item.get_closest_marker("sglang")]
    if deselected and not SGLANG_PYTHON:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Three checkpoints of one architecture: policies 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_checkpoint(folder / f"policy{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Qwen3 of two layers, for a trainer."""
    from megatron_reference import dense

    folder = tmp_path_factory.mktemp("qwen3")
    dense(folder)
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> dict[str, Path]:
    """A tiny model of each family; models that have other fields may have its weights."""
    from tiny_models import FAMILIES, make

    return {name: make(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="session")
def served(request, checkpoints, tmp_path_factory):
    """A running engine; servers start slowly, so tests share it and `engine` resets it."""
    kind = request.param
    log = tmp_path_factory.mktemp(kind) / "engine.log"
    with started(kind, checkpoints[0], log, token="a right token") as process:
        able = capabilities.probe(process.url, process.token, timeout_s=60)
        yield Served(kind, process, checkpoints, able)


@pytest.fixture
def engine(served):
    """The engine with policy 0, running and idle."""
    client = served.process.client()
    client.update_weights_from_disk(str(served.checkpoints[0]), 0)
    yield served
    client.resume()
    client.abort_all()
    client.close()


@pytest.fixture(scope="session")
def ranks():
    """Ranks of a trainer by their number; each pool is made once and keeps nothing that matters."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module", params=KINDS)
def shared(request, checkpoints, tmp_path_factory):
    """Engines and a run directory; they start slowly, so the tests of a file share them."""
    from houses import house_of

    with house_of(request.param, checkpoints, tmp_path_factory.mktemp(request.param)) as house:
        yield house


@pytest.fixture
def house(shared):
    shared.reset()
    return shared
