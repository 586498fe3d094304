"""The critic on a real bus: a model of one number, which is killed and goes on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, P, group, produce_all, sequencer, whole_batch

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.plan import PlanFollower
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.config import job_file
from relax_hpc.roles.critic import loop
from relax_hpc.roles.dealing.portions import Batch, judge_of
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter, read_events
from relax_hpc.schema import FinishReason, PromptGroup

STEPS = 5


class Killed(Exception):  # noqa: N818
    pass


class Model:
    """Values every token at its one number, which follows from all that it has learned from."""

    dp_rank, skip = 0, None
    costs = {}  # noqa: RUF012

    def __init__(self, step=0, number=0.0, dies_at=None):
        self.step, self.number, self.dies_at, self.seen = step, number, dies_at, 0.0

    def accumulate(self, rows, micro_batches, objective, *, last):
        assert last and sorted(r for b in micro_batches for r in b) == [*range(len(rows))]
        assert len(rows) == P * SIBLINGS
        for row in rows:
            assert set(row.columns) == {"values", "advantages"}
            assert float(row.columns["advantages"]) == row.reward
            self.seen += row.reward + float(row.columns["values"].sum()) + row.token_ids[-1] / 1e5

    def update(self):
        if self.dies_at == self.step + 1:
            raise Killed
        self.step, self.number = self.step + 1, 0.5 * self.number + self.seen / 100
        self.seen = 0.0
        return {"loss": self.number, "value/mean": 0.0, "value/return": 0.0}

    def forward_logprobs(self, rows, micro_batches):
        return [np.full(len(row.token_ids), self.number, np.float32) for row in rows]


class Save:
    """A checkpoint after every second step."""

    def __init__(self):
        self.step, self.number, self.position = 0, 0.0, None

    def of(self, model, duties):
        if model.step % 2 == 0:
            self.step, self.number, self.position = model.step, model.number, duties.position


@pytest.fixture
def run(tmp_path, request):
    tree = {
        "name": "run", "run_root": str(tmp_path), "model": {"path": "m"},
        "prompts": {"train": "t"}, "algorithm": {"preset": "ppo"}, "critic": {},
        "rollout": {"samples_per_prompt": SIBLINGS, "max_new_tokens": 6},
        "actor": {"tokens_per_micro_batch": 20},
        "schedule": {"num_steps": STEPS, "prompts_per_step": P, "max_staleness": 0},
    }  # fmt: skip
    if kind := getattr(request, "param", None):
        tree["algorithm"]["groups"] = {"name": "refill", "truncated": kind}
        tree["reward"] = {"on_error": "mask"}
        tree["schedule"]["max_staleness"] = STEPS
    config = job_file.validate(tree, source="job")
    paths = RunPaths(config.run_dir)
    layout.create(paths.bus, PRODUCERS, {}, sidecar_writers={"critic-0": "critic"})
    return config, paths


def open_rank0(config, paths, events, position, is_ending=lambda: False):
    writer, reader = SidecarWriter(paths.bus, "critic-0", {}), Reader(paths.bus)
    credits = CreditTail(paths.bus)
    plan = PlanFollower(paths.bus, credits, position)
    return loop.CriticRank0(config, writer, reader, credits, plan, events, is_ending)


@contextmanager
def opened(config, paths, position=None, is_ending=lambda: False):
    with EventWriter(paths.events("critic", 0), "critic", 0) as events:
        yield open_rank0(config, paths, events, position, is_ending)


def learn(config, paths, model, position=None, save=lambda duties: None, **stop):
    """A start of the critic, to its end; the model that it ends with."""
    readers = loop.Readers(Reader(paths.bus), Reader(paths.bus))
    with opened(config, paths, position) as duties:
        loop.run(config, SoloWorld(), model, None, readers, duties, lambda: save(duties), **stop)
        duties.close()
    return model


class Witness(Model):
    """Notes which rows it learned from, and what they were worth."""

    def __init__(self):
        super().__init__()
        self.batches = {}

    def accumulate(self, rows, micro_batches, objective, *, last):
        assert last and sorted(r for b in micro_batches for r in b) == [*range(len(rows))]
        self.batches[self.step + 1] = {
            (row.guid, row.sibling): float(row.columns["advantages"]) for row in rows
        }


def various(guid):
    """Two groups of five without spread; every third response is cut off, some rewards failed."""
    rows = group(guid, response=3 + guid % 4, reward=1.0 if guid % 5 < 2 else None).trajectories
    return PromptGroup(
        guid,
        [
            row._replace(
                finish=FinishReason.LENGTH if (guid + row.sibling) % 3 == 0 else row.finish,
                reward_error=guid % 7 == 3 and row.sibling == 1,
            )
            for row in rows
        ],
    )


def deal_refilled(config, paths):
    """Plans the steps of what `various` gives; {step: {(guid, sibling): advantage}} as dealt."""
    for number, name in enumerate(PRODUCERS):
        with Producer(paths.bus, name, {}) as producer:
            producer.put([various(guid) for guid in range(number, 4 * STEPS * P, 2)])
    found, reader = {}, Reader(paths.bus)
    with sequencer(paths.bus, needs=("critic",), judge=judge_of(config)) as seq:
        for step in range(1, STEPS + 1):
            record = whole_batch(seq, step, timeout_s=60)
            dealt, index = Batch(config, reader).deal(record), reader.index(record)
            found[step] = {
                (int(index.guid[row]), row % SIBLINGS): float(dealt.columns["advantages"][row])
                for batches in dealt.micro_batches
                for batch in batches
                for row in batch
            }
            seq.advance(step=step, policy_version=step)
        seq.finish()
        assert seq.find_skipped(1)
    return found


@pytest.mark.parametrize("run", ["keep", "mask", "penalty"], indirect=True)
def test_it_learns_from_the_rows_and_rewards_of_the_actor_whatever_is_skipped_or_penalised(run):
    config, paths = run
    witness = Witness()
    with ThreadPoolExecutor(1) as pool:
        dealing = pool.submit(deal_refilled, config, paths)
        learn(config, paths, witness)
        expected = dealing.result(60)
    assert witness.batches == expected
    worth = {value for rows in expected.values() for value in rows.values()}
    is_smaller = any(len(rows) < P * SIBLINGS for rows in expected.values())
    truncated = config.algorithm.groups.truncated
    assert (worth > {0.0, 1.0}, is_smaller) == (truncated == "penalty", truncated == "mask")


def sample_and_train(paths):
    """Samples a batch when the policy before it is there; the actor waits for its values."""
    with sequencer(paths.bus, needs=("critic",)) as seq:
        for step in range(1, STEPS + 1):
            produce_all(paths.bus, range((step - 1) * P, step * P))
            whole_batch(seq, step, timeout_s=30)
            seq.advance(step=step, policy_version=step)
        seq.finish()


def versions(paths):
    """Shard -> (smallest guid, version of the critic that valued it); the first one counts."""
    found = {}
    for record in read_log(paths.bus.log("critic-0")):
        if record.kind is RecordKind.SIDE:
            found.setdefault(record.parent, (record.guid_min, record.policy_version_min))
    return sorted(found.values())


def whole_run(config, paths, dies_at=None):
    saved = Save()

    def live(dies_at=None):
        model = Model(saved.step, saved.number, dies_at)
        return learn(config, paths, model, saved.position, lambda duties: saved.of(model, duties))

    with ThreadPoolExecutor(1) as pool:
        actor = pool.submit(sample_and_train, paths)
        if dies_at is not None:
            with pytest.raises(Killed):
                live(dies_at)
        model = live()
        actor.result(30)
    return model


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.mark.parametrize("dies_at", [None, 1, 2, 3, 5])
def test_whenever_it_is_killed_it_learns_the_same_and_values_are_of_the_version_before(
    run, undisturbed, dies_at
):
    config, paths = run
    model = whole_run(config, paths, dies_at)
    assert model.step == STEPS
    # max_staleness = 0: the values of batch b are exactly those of version b - 1.
    assert [version for _, version in versions(paths)] == [guid // P for guid, _ in versions(paths)]
    assert len(versions(paths)) == P * STEPS
    steps = {}
    for event in read_events(paths.events_folder):
        if event["event"] == "critic_step":
            assert steps.setdefault(event["step"], event["loss"]) == event["loss"]
    assert undisturbed.setdefault("losses", steps) == steps and len(steps) == STEPS
