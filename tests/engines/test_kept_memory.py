"""What `check` says that a rank keeps on its GPU is what it keeps."""

import megatron_worker as worker
import numpy as np
import pytest
from megatron_reference import mixture, narrow
from megatron_worker import job
from seen_rows import make

from relax_hpc.engines.megatron.optimizer import memory
from relax_hpc.models.registry import read_architecture

BF16 = {"dtype": "bfloat16"}
HALF = BF16 | {"optimizer": {"moments": "bfloat16", "ddp": {"grad_reduce_in_fp32": False}}}


def tied(folder):
    return narrow(folder, tied=True)


def untied(folder):
    return narrow(folder, tied=False)


def mixed(folder):
    mixture(folder)
    return folder


def seeing(folder):
    make(folder)
    return folder


def hearing(folder):
    make(folder, kind="omni")
    return folder


def told_of(config, folder):
    actor, shape = config.actor, read_architecture(folder)
    return memory.held(
        actor, actor.optimizer, shape, config.model.dtype, frozen=actor.frozen, lora=actor.lora
    )


@pytest.mark.parametrize(
    ("model", "ranks_of", "options"),
    [
        (tied, 1, {}),
        (tied, 1, BF16),
        (untied, 1, HALF),
        (tied, 2, BF16 | {"tp": 2}),
        (tied, 2, HALF | {"dp": 2}),
        (tied, 2, BF16 | {"layout": {"pipeline_parallel": 2}}),
        (untied, 2, BF16 | {"layout": {"pipeline_parallel": 2, "virtual_pipeline": 2}}),
        (untied, 2, BF16 | {"layout": {"context_parallel": 2}}),
        (mixed, 1, BF16),
        (mixed, 2, BF16 | {"layout": {"data_parallel": 2, "expert_parallel": 2}}),
        (mixed, 2, BF16 | {"layout": {"data_parallel": 2, "expert_tensor_parallel": 2}}),
        (mixed, 4, BF16 | {"layout": {"data_parallel": 4, "expert_parallel": 2}}),
        (seeing, 1, BF16),
        (seeing, 2, BF16 | {"layout": {"pipeline_parallel": 2}}),
        (seeing, 2, BF16 | {"tp": 2, "actor": {"frozen": ["vision"]}}),
        (hearing, 2, BF16 | {"tp": 2, "dp": 1, "actor": {"frozen": ["audio", "language"]}}),
        (untied, 2, BF16 | {"dp": 2, "actor": {"lora": {"rank": 4}}}),
    ],
)
def test_what_is_kept_is_what_is_counted(ranks, tmp_path, model, ranks_of, options):
    folder, layout = model(tmp_path / "model"), dict(options).get("layout", {})
    config = job(folder, **options)
    told = told_of(config, folder)
    ranks[ranks_of].call(worker.open_trainer, config=config)
    found = np.array(ranks[ranks_of].call(worker.kept_bytes), float)  # [ranks, 3]
    stages = layout.get("pipeline_parallel", 1)
    of_stages = found.reshape(stages, -1, 3).mean(axis=1)  # shares are of many sizes
    fullest = of_stages[of_stages.sum(axis=1).argmax()]
    assert told == pytest.approx(fullest, rel=1e-6)


def test_what_lies_in_host_memory_is_not_counted(ranks, tmp_path):
    def kept(offload):
        tables = BF16 | {"optimizer": {"offload": offload}}
        config = job(folder, **tables)
        ranks[1].call(worker.open_trainer, config=config)
        return told_of(config, folder), ranks[1].call(worker.kept_bytes)[0]

    folder = untied(tmp_path / "model")
    told, found = kept(1.0)
    assert told == found and told.optimizer == 0 < told.gradients
    told, found = kept(0.5)  # whole parameters
    assert told.optimizer == pytest.approx(found[2], rel=0.2) and told[:2] == found[:2]


def test_of_uneven_stages_nothing_is_said(tmp_path):
    options = {"num_layers_in_first_pipeline_stage": 1}
    config = job(tmp_path, layout={"pipeline_parallel": 2}, transformer=options)
    assert told_of(config, untied(tmp_path / "model")) is None
