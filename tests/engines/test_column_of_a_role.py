"""A column of a new role, from its sidecar to the loss of a training step.

Declared by a row of the table of roles, one of COLUMNS, and a loss that names it.
"""

import numpy as np
import pytest
from own_parts import GAMMA, SURPRISE
from trainers import job, opened, trajectories

from relax_hpc.bus import layout, log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard_format import DTYPES
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles import table as roles
from relax_hpc.roles.dealing.portions import Comparison, values_of
from relax_hpc.roles.role import Place, Role
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import COLUMN_WRITERS, COLUMNS, Column, PromptGroup
from relax_hpc.sections import Resources

GROUPS, SIBLINGS = 4, 2
NAME = "ragged/surprise"


@pytest.fixture
def config(monkeypatch, folder):
    """A job of the algorithm; its column is of a role that is in no job yet."""
    column = Column("float32", "token", "judge", "how odd a judge finds a token")
    monkeypatch.setitem(COLUMN_WRITERS, "judge", 16)
    monkeypatch.setitem(log.ROLE_OF_NUMBER, 16, "judge")
    monkeypatch.setitem(COLUMNS, NAME, column)
    monkeypatch.setitem(DTYPES, NAME, column.dtype)
    return job(
        folder,
        algorithm=SURPRISE,
        schedule={"num_steps": 100, "prompts_per_step": GROUPS},
        rollout={"samples_per_prompt": SIBLINGS},
    )


def sampled():
    made, _ = trajectories(GROUPS * SIBLINGS)
    return [
        PromptGroup(
            guid,
            [
                made[guid * SIBLINGS + sibling]._replace(
                    guid=guid, sibling=sibling, reward=guid + float(sibling),
                    turns=np.array([[0, 0], [made[guid * SIBLINGS + sibling].prompt_len, 1]], "i4"),
                )
                for sibling in range(SIBLINGS)
            ],
        )
        for guid in range(GROUPS)
    ]  # fmt: skip


def rows_of(config, root, scale):
    """The rows of a batch, and what they are worth; the judge finds a token odd by its number."""
    paths, writers = BusPaths(root / "bus"), roles.sidecar_writers(config)
    layout.create(paths, config.producers, {}, sidecar_writers=writers)
    with Producer(paths, config.producers[0], {"job": 7}) as producer:
        producer.put(sampled())
    with SidecarWriter(paths, "judge-0", {"job": 7}) as writer:
        for pending in writer.pending():
            with writer.open(pending) as shard:
                tokens = shard.read("ragged/token_ids")
            writer.put(pending, {NAME: (scale * tokens).astype(np.float32)})
    needs = layout.roles_of(layout.open_bus(paths), config.columns)
    with Sequencer(paths, prompts_per_step=GROUPS, position=None, needs=needs) as sequencer:
        record = sequencer.next_portion(1, timeout_s=0)
    assert record.last
    reader = Reader(paths)
    index = reader.index(record)
    columns, teaching = values_of(index, Comparison(config.algorithm, SIBLINGS, longest=8))
    assert len(teaching) == GROUPS * SIBLINGS
    return reader.rows(record, teaching.tolist(), config.columns), columns["advantages"]


def test_the_loss_is_the_one_worked_by_hand_and_follows_the_column(
    ranks, config, folder, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match="needs the column ragged/surprise, which the role judge"):
        roles.check_columns(config)
    place = Place("judge", 1, Resources())
    judge = Role("judge", JobConfig, lambda *_: None, places=lambda _: [place], writes="judge")
    monkeypatch.setattr(roles, "ROLES", (*roles.ROLES, judge))
    roles.check_columns(config)
    assert roles.sidecar_writers(config) == {"judge-0": "judge"}
    found = []
    for number, scale in enumerate((0.5, 2.0)):
        root = tmp_path / str(number)
        root.mkdir()
        rows, worth = rows_of(config, root, scale)
        metrics = opened(ranks, folder).train(rows=rows, advantages=worth, loss="surprise")[0]
        trained = [(row, np.flatnonzero(row.loss_mask)) for row in rows]
        total = sum(
            scale * row.token_ids[where].astype(np.float64).sum() * row.reward
            for row, where in trained
        )
        mean = total / sum(len(where) for _, where in trained)
        assert metrics["loss"] == pytest.approx(-mean, rel=1e-4)
        found.append(metrics)
    for key in ("loss", "grad_norm"):
        assert found[1][key] == pytest.approx(4 * found[0][key], rel=1e-4)


def test_discounted_returns_train_alike_in_any_split_and_as_worked_by_hand(ranks, folder):
    """The reward of a token is the logprob that it was sampled with."""
    rows, _ = trajectories(12)
    total = count = 0
    for row in rows:
        worth = 0.0
        for trained, reward in zip(
            row.loss_mask[::-1], row.columns["rollout_logprobs"][::-1], strict=True
        ):
            worth = GAMMA * worth + (float(reward) if trained else 0.0)
            total, count = total + worth * bool(trained), count + int(trained)
    unused = np.full(len(rows), np.nan, np.float32)
    batch = {"rows": rows, "advantages": unused, "loss": "discounted"}
    found = [
        opened(ranks, folder, grid, budget=budget).train(**batch, num_portions=portions)[0]
        for grid, budget, portions in (
            ("one", 1000, 1),
            ("one", 20, 3),
            ("dp2", 50, 2),
            ("cp2", 50, 1),
        )
    ]
    for metrics in found:
        assert metrics["loss"] == pytest.approx(-total / count, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)
