"""What `check` says that a rank keeps on its GPU is what it keeps."""

import numpy as np
import pytest
from megatron_reference import mixture, narrow
from seen_rows import make
from trainers import job, opened

from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.models.registry import read_architecture

BF16 = {"dtype": "bfloat16"}
HALF = BF16 | {"optimizer": {"moments": "bfloat16", "ddp": {"grad_reduce_in_fp32": False}}}


def hybrid(folder):
    mixture(folder)
    return folder


def media(kind):
    def made(folder):
        make(folder, kind=kind)
        return folder

    return made


MODELS = {
    "tied": narrow, "untied": lambda folder: narrow(folder, tied=False), "mixed": hybrid,
    "seeing": media("vl"), "hearing": media("omni"),
}  # fmt: skip


def told_of(config, folder):
    actor, shape = config.actor, read_architecture(folder)
    return fit.count_held(
        actor, actor.optimizer, shape, config.model.dtype, frozen=actor.frozen, lora=actor.lora
    )


@pytest.mark.parametrize(
    ("model", "grid", "options"),
    [
        ("tied", "one", BF16),
        ("untied", "one", HALF),
        ("tied", "dp2", HALF),
        ("tied", "pp2", BF16),
        ("untied", "pp2_vpp2", BF16),
        ("mixed", "dp2_ep2", BF16),
        ("mixed", "dp4_ep2", BF16),
        ("seeing", "pp2", BF16),
        ("seeing", "tp2", BF16 | {"actor": {"frozen": ["vision"]}}),
        ("hearing", "tp2", BF16 | {"actor": {"frozen": ["audio", "language"]}}),
        ("untied", "dp2", BF16 | {"actor": {"lora": {"rank": 4}}}),
    ],
)
def test_what_is_kept_is_what_is_counted(ranks, tmp_path, model, grid, options):
    folder = MODELS[model](tmp_path / "model")
    told = told_of(job(folder, grid, **options), folder)
    found = np.array(opened(ranks, folder, grid, **options).kept_bytes(), float)  # [ranks, 3]
    stages = 2 if grid.startswith("pp2") else 1
    of_stages = found.reshape(stages, -1, 3).mean(axis=1)  # shares are of many sizes
    fullest = of_stages[of_stages.sum(axis=1).argmax()]
    assert told == pytest.approx(fullest, rel=1e-6)


def test_what_lies_in_host_memory_is_not_counted(ranks, tmp_path):
    def kept(offload):
        tables = BF16 | {"optimizer": {"offload": offload}}
        kept = opened(ranks, folder, **tables).kept_bytes()[0]
        return told_of(job(folder, **tables), folder), kept

    folder = narrow(tmp_path / "model", tied=False)
    told, found = kept(1.0)
    assert told == found and told.optimizer == 0 < told.gradients
    told, found = kept(0.5)  # whole parameters
    assert told.optimizer == pytest.approx(found[2], rel=0.2) and told[:2] == found[:2]
