"""The functions that tests of the critic run on ranks of a pool."""

from pathlib import Path

import megatron_worker as worker
import numpy as np


def open_critic(config, weights=None):
    import torch
    import torch.distributed as dist

    from relax_hpc.engines.megatron.critic import MegatronCritic

    worker._set_grid(config.actor.layout)
    worker._state["config"] = config
    model = config.model.model_copy(update={"weights": weights}) if weights else config.model
    worker._state["trainer"] = MegatronCritic(
        model, config.actor, config.actor.optimizer,
        worker.FixedWorld(dist.get_rank(), dist.get_world_size()), torch.device("cpu"),
        num_steps=config.num_steps, seed=config.seed,
    )  # fmt: skip


def learn(rows, num_steps=1, num_portions=1, clip=0.0):
    """Trains on the rows' rewards; `values` are what the critic held before each step."""
    from relax_hpc.algorithms.composition import Objective
    from relax_hpc.algorithms.value_loss import value_loss

    trainer = worker._state["trainer"]
    objective = Objective(value_loss(clip=clip, gamma=1.0, lam=1.0))
    for _ in range(num_steps):
        shares = worker._shares(rows, num_portions)
        for number, (portion, micro_batches) in enumerate(shares, 1):
            chosen = [
                rows[row]._replace(
                    columns={
                        "advantages": np.float32(rows[row].reward),
                        "values": np.zeros(len(rows[row].token_ids), np.float32),
                    }
                )
                for row in portion
            ]
            trainer.accumulate(chosen, micro_batches, objective, last=number == len(shares))
        metrics = trainer.update()
    return metrics


def values(rows):
    """The rank's own rows -> {row: V}."""
    ((_, micro_batches),) = worker._shares(rows)
    found = worker._state["trainer"].forward_values(rows, micro_batches)
    return {row: found[row] for batch in micro_batches for row in batch}


def parameters():
    """Names of this rank's parameters."""
    return sorted(n for c in worker._state["trainer"]._chunks for n, _ in c.named_parameters())


def save(folder: Path):
    return worker.save(folder)


def load(folder: Path):
    return worker.load(folder)
