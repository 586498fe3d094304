"""The reference and teachers on a real bus: models that only say back what they were given."""

import threading

import numpy as np
import pytest
from bus_fixtures import SIBLINGS, batch, make_bus, produce_all, rows_of, sequencer

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.config.model import Layout, MegatronConfig
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.scorer import build as rank0
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.build import COLUMN, ScoringView
from relax_hpc.roles.teacher.routing import of_its_teacher
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.telemetry.events import EventWriter, read_events

GROUPS = 12
WRITERS = {"reference-0": "reference", "one-0": "teacher", "two-0": "teacher_2"}
TAUGHT = ("ragged/teacher_logprobs", "ragged/teacher_logprobs_2")
HAS = {"one": lambda guids: guids % 3 == 0, "two": lambda guids: guids % 3 > 0}


class Echo:
    """Logprobs of a token are its number, negated."""

    def __init__(self, dp_rank=0, fail_after=None):
        self.dp_rank, self.rows, self.calls, self.fail_after = dp_rank, 0, 0, fail_after

    def forward_logprobs(self, trajectories, micro_batches):
        self.calls += bool(trajectories)
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyError("killed")
        self.rows += len(trajectories)
        assert sorted(r for batch in micro_batches for r in batch) == [*range(len(trajectories))]
        return [-row.token_ids.astype(np.float32) for row in trajectories]


@pytest.fixture
def paths(tmp_path):
    made = make_bus(tmp_path, writers=WRITERS)
    produce_all(made, GROUPS, per_shard=2)
    return made


def open_rank0(
    paths, events, *, data_parallel=1, budget=20, name="reference", column=COLUMN, view=None
):
    return rank0.ScorerRank0(
        MegatronConfig(tokens_per_micro_batch=budget, layout=Layout(data_parallel=data_parallel)),
        column,
        SidecarWriter(paths, f"{name}-0", {}),
        Reader(paths),
        CreditTail(paths),
        events,
        view,
    )


def score(paths, tmp_path, scorer=None):
    """Runs the role until everything there is has been scored."""
    scorer = scorer or Echo()
    with EventWriter(tmp_path / "events" / "reference-0.jsonl", "reference", 0) as events:
        mine = open_rank0(paths, events)
        with finished_when(paths, lambda: not mine._writer.pending() and not mine._unsent):
            loop.run(SoloWorld(), scorer, Reader(paths), mine, StepMedia(Reader(paths), None))
        mine.close()
    return scorer


class finished_when:  # noqa: N801 - reads as a statement
    """A trainer that says it is finished as soon as `done` holds."""

    def __init__(self, paths, done):
        self.paths, self.done, self.over = paths, done, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        with sequencer(self.paths) as seq:
            while not self.over.wait(0.02):
                if self.done():
                    seq.finish()
                    return

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(10)


def parents(paths, name):
    """Shards that a role has widened, one after the other."""
    return [r.parent for r in read_log(paths.log(f"{name}-0")) if r.kind is RecordKind.SIDE]


def planned_rows(paths, *needs):
    """All trajectories of three batches, as the actor reads them."""
    with sequencer(paths, needs=needs) as seq:
        return rows_of(paths, *(batch(seq, step) for step in (1, 2, 3)))


def assert_every_row_scored(paths):
    rows = planned_rows(paths, "reference")
    assert len(rows) == GROUPS * SIBLINGS
    for row in rows:
        assert np.array_equal(row.columns["ref_logprobs"], -row.token_ids.astype(np.float32))


def test_every_committed_row_gets_the_logprobs_of_its_own_tokens(paths, tmp_path):
    scorer = score(paths, tmp_path)
    assert scorer.rows == GROUPS * SIBLINGS and scorer.calls > 1  # in several rounds
    assert_every_row_scored(paths)
    scored = [e for e in read_events(tmp_path / "events") if e["event"] == "scored"]
    assert sum(e["num_trajectories"] for e in scored) == GROUPS * SIBLINGS
    assert sum(e["num_tokens"] for e in scored) == GROUPS * SIBLINGS * 7


def test_a_restarted_task_scores_what_is_left_and_nothing_twice(paths, tmp_path):
    with pytest.raises(KeyError, match="killed"):
        score(paths, tmp_path, Echo(fail_after=1))
    assert 0 < len(parents(paths, "reference")) < GROUPS // 2
    score(paths, tmp_path)
    done = parents(paths, "reference")
    assert len(done) == len(set(done)) == GROUPS // 2
    assert_every_row_scored(paths)


# teachers, each of which writes what it is to teach


class Prompts:
    """Those of the other prompts are the row's number, over and over, and longer than its own."""

    def __getitem__(self, index):
        return np.full(5, index, np.int32)


class Told(Echo):
    """Logprobs of a token are the one before it, negated, and 1000 times the first one."""

    def forward_logprobs(self, trajectories, micro_batches):
        assert not any(row.loss_mask[:5].any() for row in trajectories)
        super().forward_logprobs(trajectories, micro_batches)
        return [
            np.append(0, -row.token_ids[:-1] - 1000.0 * row.token_ids[0]).astype("f4")
            for row in trajectories
        ]


def teach(paths, tmp_path, name, scorer=None, prompts=None):
    """Lets a teacher score until everything there is has been scored."""
    scorer, view = scorer or Echo(), ScoringView(HAS[name], prompts and prompts.__getitem__)
    with EventWriter(tmp_path / "events" / f"{name}-0.jsonl", name, 0) as events:
        mine = open_rank0(paths, events, name=name, column=TAUGHT[name == "two"], view=view)
        next_task = mine.next_task
        mine.next_task = lambda *given: next_task(*given) if mine._writer.pending() else None
        loop.run(SoloWorld(), scorer, Reader(paths), mine, StepMedia(Reader(paths), None))
        mine.close()
    return scorer


def test_each_teacher_scores_its_own_prompts_and_a_row_has_the_values_of_its_teacher(
    paths, tmp_path
):
    one, two = (teach(paths, tmp_path, name) for name in ("one", "two"))
    assert (one.rows, two.rows) == (GROUPS // 3 * SIBLINGS, GROUPS * 2 // 3 * SIBLINGS)
    rows = planned_rows(paths, "teacher", "teacher_2")
    assert len(rows) == GROUPS * SIBLINGS
    for row in rows:
        names = TAUGHT[::-1] if row.guid % 3 else TAUGHT
        mine, others = (row.columns[name.split("/")[1]] for name in names)
        assert np.array_equal(mine, -row.token_ids.astype("f4")) and np.isnan(others).all()
        found = of_its_teacher(row, TAUGHT).columns
        assert np.array_equal(found["teacher_logprobs"], mine)
        assert "teacher_logprobs_2" not in found and "rollout_logprobs" in found


def test_a_privileged_teacher_sees_the_response_behind_a_prompt_of_its_own(paths, tmp_path):
    teach(paths, tmp_path, "one", Told(), Prompts())
    teach(paths, tmp_path, "two")
    taught = [row for row in planned_rows(paths, "teacher", "teacher_2") if row.guid % 3 == 0]
    for row in taught:
        ids, n, told = row.token_ids.astype("f8"), row.prompt_len, row.prompt_index
        before = np.append(told, ids[n:-1])  # the other prompt's last token, then its own
        found = row.columns["teacher_logprobs"]
        assert found[:n].tolist() == [0] * n
        np.testing.assert_array_equal(found[n:], (-before - 1000.0 * told).astype("f4"))
